"""Texts that the labelled set of quality flags is made from; each half has its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A subject with sentences about it, each true by itself."""

    name: str
    question: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A question and an answer in one language."""

    language: str
    question: str
    answer: str


def _topic(name: str, question: str, *sentences: str) -> Topic:
    return Topic(name=name, question=question, sentences=sentences)


TOPICS = {
    "tuned": (
        _topic(
            "bread",
            "Why does bread dough have to rest before it is baked?",
            "Flour holds proteins that join into gluten once they are wet.",
            "While the dough rests, the gluten relaxes and can be stretched without tearing.",
            "Yeast turns sugar into carbon dioxide, and the gas lifts the loaf.",
            "A slow rise in the fridge gives acids time to form, which taste good.",
            "If the dough springs back at once when you poke it, give it more time.",
            "A warm kitchen halves the wait, a cold one doubles it.",
        ),
        _topic(
            "tides",
            "What causes the tides and why are there two a day?",
            "The moon pulls harder on the side of the earth that faces it.",
            "Water on the far side is left behind, so a second bulge forms there.",
            "As the earth turns, a harbour passes through both bulges.",
            "The sun does the same at a bit under half the strength.",
            "When sun and moon line up we see spring tides, which are higher.",
            "Narrow bays such as Fundy pile the water up to sixteen metres.",
        ),
        _topic(
            "git",
            "How do I undo my last commit without losing the changes?",
            "Run `git reset --soft HEAD~1` to move the branch back by one commit.",
            "Your files stay as they are and remain staged.",
            "Use `--mixed` if you would rather stage them again by hand.",
            "Do not do this to a commit that others have already pulled.",
            "For a shared branch, `git revert` adds a commit that takes the change back.",
            "You can always find the old commit with `git reflog`.",
        ),
        _topic(
            "sleep",
            "How can I fall asleep faster after working late?",
            "Dim the lights an hour before bed, because bright light delays melatonin.",
            "Write tomorrow's tasks on paper so that your head can let go of them.",
            "Keep the room cool; around eighteen degrees suits most people.",
            "Coffee after two in the afternoon is still in your blood at ten.",
            "If you lie awake for twenty minutes, get up and read something dull.",
            "Rising at the same hour each day matters more than when you go to bed.",
        ),
        _topic(
            "volcano",
            "Explain how volcanoes form.",
            "Most volcanoes stand where one plate slides under another.",
            "Water carried down by the sinking plate lowers the melting point of the rock.",
            "The melt is lighter than what surrounds it and rises.",
            "Gas dissolved in the magma comes out as the pressure falls, like in a bottle.",
            "Thick magma holds the gas back and explodes; thin magma flows.",
            "Hawaii is another case: a plume from deep below burns through the plate.",
        ),
        _topic(
            "interest",
            "What is compound interest and why does it matter for savings?",
            "Interest is paid on the deposit and on the interest of earlier years.",
            "A thousand at five per cent becomes 1,050 after a year and 1,102.50 after two.",
            "After fourteen years the sum has roughly doubled.",
            "Fees work in the same way, only against you.",
            "Starting ten years sooner often beats saving twice as much.",
            "The rule of 72 gives the doubling time: divide 72 by the rate.",
        ),
        _topic(
            "sql",
            "What is the difference between an inner join and a left join?",
            "An inner join keeps rows that have a partner in both tables.",
            "A left join keeps every row of the first table.",
            "Where no partner is found, the columns of the second table are NULL.",
            "Counting orders by customer needs a left join if idle customers should show as zero.",
            "A condition on the right table belongs in ON, since WHERE would drop the NULL rows.",
            "Most planners run either with a hash table on the smaller side.",
        ),
        _topic(
            "roman roads",
            "Why did Roman roads last so long?",
            "The builders dug down to firm ground before they laid anything.",
            "Layers of rubble, gravel and lime mortar spread the load.",
            "A raised middle let the rain run off into ditches.",
            "Heavy wagons were rare, so the surface wore slowly.",
            "Many modern highways still follow their course.",
            "Upkeep was a duty of the towns along the way.",
        ),
    ),
    "held_out": (
        _topic(
            "bees",
            "How do honeybees tell each other where flowers are?",
            "A forager that comes home dances on the comb.",
            "The angle of her straight run against gravity is the angle of the flowers to the sun.",
            "The longer she waggles, the farther the food is.",
            "Others follow her in the dark and feel the movement with their antennae.",
            "They taste samples of the nectar she has brought.",
            "Karl von Frisch worked this out in the nineteen-twenties and later won a Nobel Prize.",
        ),
        _topic(
            "bicycle",
            "What keeps a bicycle upright when it moves?",
            "A rider steers under the fall without noticing it.",
            "The front wheel's contact point trails behind the steering axis, which helps.",
            "Spinning wheels add a little gyroscopic torque, yet it is not needed.",
            "Researchers in Delft built a bicycle with neither effect that still balances.",
            "The mass of the handlebar part also matters.",
            "Below about ten kilometres per hour the rider has to work for it.",
        ),
        _topic(
            "docker",
            "Why is my Docker image so large and how can I shrink it?",
            "Every instruction in a Dockerfile adds a layer, and deleted files stay in the old one.",
            "Install and clean up in the same RUN line.",
            "A multi-stage build leaves compilers behind.",
            "Start `FROM debian:bookworm-slim` rather than the full image.",
            "A `.dockerignore` keeps the history and test data out of the context.",
            "`docker history IMAGE` shows which step costs most.",
        ),
        _topic(
            "vaccine",
            "Describe how vaccines train the immune system.",
            "A vaccine shows the body a harmless piece of a germ.",
            "Cells that happen to fit this piece multiply over the next days.",
            "Some of them become memory cells and stay for years.",
            "At the real infection they respond within hours rather than a week.",
            "A booster raises both their number and how well they bind.",
            "Fever on the second day is a sign of this work, not of the disease.",
        ),
        _topic(
            "chess",
            "What should a beginner learn first in chess?",
            "Learn to see which pieces are undefended before every move.",
            "Simple tactics such as forks and pins decide most early games.",
            "Bring knights and bishops out before the queen.",
            "Castle within the first ten moves if nothing speaks against it.",
            "King and pawn endings repay an evening of study.",
            "Playing slow games teaches more than a hundred fast ones.",
        ),
        _topic(
            "glass",
            "Is glass a liquid that flows over centuries?",
            "Glass is an amorphous solid: its atoms are locked in place without a lattice.",
            "Old windows are thicker at one edge because of how crown glass was spun.",
            "Glaziers usually put the heavy edge at the bottom.",
            "At room temperature the flow in a billion years would be less than an atom's width.",
            "Roman vessels show no sagging at all.",
            "Above six hundred degrees it softens step by step rather than melting at once.",
        ),
        _topic(
            "caching",
            "Explain when a cache makes a web service slower.",
            "A cache that misses most of the time adds a lookup to every request.",
            "Entries that are large cost more to serialise than to compute.",
            "When a popular key expires, all servers rush to rebuild it together.",
            "Locks around a shared map serialise threads that used to run side by side.",
            "Stale entries force retries in clients that check versions.",
            "Measure the hit rate before you tune anything else.",
        ),
        _topic(
            "marathon",
            "How should I train for my first marathon?",
            "Build up to forty kilometres a week before any special training.",
            "One long run each weekend grows by two kilometres at a time.",
            "Four out of five runs should be slow enough to talk.",
            "Practise drinking and eating at the pace you plan.",
            "Cut the volume by half in the last two weeks.",
            "Shoes for the race need eighty kilometres on them already.",
        ),
    ),
}

FOREIGN = {
    "tuned": (
        Foreign(
            language="de",
            question="Warum ist der Himmel am Tag blau und am Abend rot? Bitte erkläre es mir so, "
            "dass auch ein Schulkind den Unterschied gut verstehen kann.",
            answer="Das Licht der Sonne besteht aus allen Farben. Die Luft streut das blaue Licht "
            "viel stärker als das rote, deshalb kommt Blau aus allen Richtungen zu uns. Am Abend "
            "ist der Weg durch die Luft länger, und vom blauen Licht bleibt kaum etwas übrig.",
        ),
        Foreign(
            language="fr",
            question="Quelle est la différence entre le climat et la météo, et pourquoi les gens "
            "les confondent-ils aussi souvent dans les conversations de tous les jours ?",
            answer="La météo décrit ce qui se passe dehors aujourd'hui ou cette semaine. Le climat "
            "est la moyenne de ces états sur trente ans au moins. Un hiver froid ne dit donc rien "
            "du climat, et c'est pourquoi il faut regarder de longues séries de mesures.",
        ),
        Foreign(
            language="es",
            question="¿Cómo puedo cuidar una planta de albahaca para que no se muera en invierno "
            "dentro de un piso pequeño y con poca luz natural durante el día?",
            answer="Ponla en la ventana con más luz y riégala solo cuando la tierra esté seca. "
            "Corta las flores en cuanto aparezcan, porque quitan fuerza a las hojas. En invierno "
            "crece despacio, así que no le des abono hasta la primavera.",
        ),
        Foreign(
            language="zh",
            question="为什么冬天的白天比夏天短？请用简单的话告诉我其中的道理，最好举一个生活中的例子。",
            answer="地球的自转轴是倾斜的。冬天的时候，我们所在的半球背向太阳，太阳在天空中的路线更低也更短，"
            "所以白天的时间就少了。夏天正好相反，太阳升得更高，白天也就更长。可以用手电筒照一个倾斜的球来看。",
        ),
    ),
    "held_out": (
        Foreign(
            language="it",
            question="Perché il caffè della moka ha un sapore diverso da quello della macchina "
            "del bar, anche quando uso la stessa miscela e la stessa acqua di casa?",
            answer="Nella moka l'acqua passa attraverso la polvere con una pressione molto bassa e "
            "a una temperatura più alta. Per questo il caffè estrae più sostanze amare e meno "
            "oli. La macchina del bar lavora a nove atmosfere e in meno di trenta secondi.",
        ),
        Foreign(
            language="pt",
            question="Como faço para aprender a tocar violão sozinho em casa, sem professor e com "
            "apenas meia hora livre por dia depois do trabalho?",
            answer="Comece com três acordes e troque entre eles até que os dedos encontrem o "
            "caminho sozinhos. Use um metrônomo desde o primeiro dia. Toque músicas de que você "
            "gosta, porque assim a meia hora passa depressa e você volta amanhã.",
        ),
        Foreign(
            language="ru",
            question="Почему зимой машина расходует больше топлива, чем летом, и что можно "
            "сделать, чтобы расход стал меньше, если ездить только по городу?",
            answer="Холодный двигатель работает на более богатой смеси, пока не прогреется. Масло "
            "густеет, шины теряют давление, а печка и фары берут больше тока. Проверяйте "
            "давление в шинах и объединяйте короткие поездки в одну длинную.",
        ),
        Foreign(
            language="ja",
            question="コーヒーを飲むと眠れなくなるのはなぜですか。子どもにもわかるように説明してください。",
            answer="体が疲れると、脳の中にアデノシンという物質がたまって眠くなります。"
            "コーヒーのカフェインは、その物質が座るはずの席に先に座ってしまいます。"
            "すると脳は疲れに気づかず、しばらくのあいだ目がさめたままになるのです。",
        ),
    ),
}

REASONING = {
    "tuned": (
        (
            "The user asks about {topic}. I should give the main cause first, then the details. Let me "
            "check the numbers: they look right. I will keep it to a paragraph or two."
        ),
        (
            "Okay, so this is about {topic}. What are the key points? First the mechanism, then when "
            "it matters. Wait, is there an exception? Yes, one, and I will mention it at the end."
        ),
        (
            "We need an explanation of {topic} that is correct and short. Hmm, the usual picture is "
            "misleading, so let me avoid it and use plain words instead."
        ),
    ),
    "held_out": (
        (
            "A question on {topic}. There are two common mistakes here, and I want to avoid both. I "
            "recall the mechanism well enough to explain it without formulas."
        ),
        (
            "Let me think about {topic}. The short version would be enough, but an example makes it "
            "clearer. I'd go with the short version and one example."
        ),
        (
            "They want to understand {topic}. Start from what they already know; then add the step "
            "that surprises people. Double-check the figures before writing them down."
        ),
    ),
}
