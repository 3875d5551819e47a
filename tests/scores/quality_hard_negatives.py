"""Good rows that look bad at a glance: `(kind, question, answer)`, for each half of the set."""

_TESTS_IN_CODE = "\n".join(
    f"    def test_{name}(self):\n        self.assertEqual(convert({number}), expected)\n"
    f"        self.assertIsNone(self.last_error)\n"
    for number, name in enumerate(("zero", "one", "two", "big", "small", "sum", "gap", "end"))
)
_MATRIX = "\n".join("[" + ", ".join(["0"] * 16) + "]," for _ in range(16))
_LOG = "\n".join(f"10:{m:02d}:{m * 7 % 60:02d} INFO worker heartbeat ok" for m in range(40))
_PLAIN_LOG = "\n".join("INFO worker heartbeat ok" for _ in range(40))
_TABLE = "\n".join(
    ["| Day | Morning | Evening |", "| --- | --- | --- |"]
    + [f"| Day {day} | Rest | Rest |" for day in range(1, 31)]
)
_JSON = (
    "[\n"
    + ",\n".join(
        f'  {{"id": {n}, "name": "item-{n}", "active": true, "tags": []}}' for n in range(40)
    )
    + "\n]"
)
_BOTTLES = "\n".join(
    f"{n} bottles of beer on the wall, {n} bottles of beer.\nTake one down and pass it around, "
    f"{n - 1} bottles of beer on the wall.\n"
    for n in range(30, 10, -1)
)
_REFRAIN = (
    "The river runs, the river runs,\nand nobody asks it why.\n\n"
    "We came down early from the hill,\nthe grass was wet, the air was still.\n"
    "The river runs, the river runs,\nand nobody asks it why.\n\n"
    "My father fished here as a boy,\nwith borrowed line and borrowed joy.\n"
    "The river runs, the river runs,\nand nobody asks it why.\n\n"
    "Some day my son will stand here too,\nand watch the herons passing through.\n"
    "The river runs, the river runs,\nand nobody asks it why."
)
_PANTOUM = (
    "The lamps go on along the quay,\nthe ferries leave without a sound.\n"
    "I keep the ticket that you gave to me,\nthe harbour water turns around.\n\n"
    "The ferries leave without a sound,\na gull complains above the pier.\n"
    "The harbour water turns around,\nI count the days since you were here.\n\n"
    "A gull complains above the pier,\nthe wind has nothing new to say.\n"
    "I count the days since you were here,\nthe lamps go out at break of day."
)
_DERIVATION = "\n".join(
    f"(x + {n})^2 - (x + {n - 1})^2 = 2x + {2 * n - 1}, so the difference grows by 2 again."
    for n in range(1, 16)
)
_TIMES_TABLE = "\n".join(f"{a} x {b} = {a * b}" for a in range(2, 8) for b in range(1, 11))
_STEPS = "\n".join(
    f"{n}. Open the {part} panel, clear the old value, and press Save."
    for n, part in enumerate(
        ("network", "display", "sound", "storage", "privacy", "update", "backup", "region"), 1
    )
)
_SVG = "```svg\n<svg>\n" + '  <circle cx="5" cy="5" r="1"/>\n' * 60 + "</svg>\n```"
_CSS = "\n".join(
    f".col-{n} {{\n  float: left;\n  width: {n * 100 / 12:.2f}%;\n  padding: 0 15px;\n}}"
    for n in range(1, 13)
)
_INSERTS = "\n".join(
    f"INSERT INTO cities (name, country) VALUES ('{name}', 'FI');"
    for name in ("Oulu", "Turku", "Espoo", "Vaasa", "Lahti", "Pori", "Kotka", "Kuopio", "Joensuu")
)

HARD_NEGATIVES = {
    "tuned": (
        ("code", "Write unit tests for convert.", f"```python\nclass T:\n{_TESTS_IN_CODE}```"),
        (
            "code",
            "Give me a 16 by 16 zero matrix in Python.",
            f"```python\nm = [\n{_MATRIX}\n]\n```",
        ),
        ("log", "Show a sample log with a heartbeat a minute.", f"Here it is:\n\n{_LOG}"),
        ("log", "What does a silent hour look like?", f"```\n{_PLAIN_LOG}\n```\nNothing happened."),
        ("table", "Make a rest plan for a month.", _TABLE),
        ("json", "Return forty items as JSON.", _JSON),
        ("song", "Sing the bottles song from thirty.", _BOTTLES),
        ("poem", "Write a poem about a river with a refrain.", _REFRAIN),
        ("math", "Show that differences of squares grow by two.", _DERIVATION),
        ("short", "What is 6 times 7? Answer with the number only.", "42"),
        ("short", "Is 91 prime? Answer yes or no.", "No."),
        ("short", "Which option is right, A, B, C or D?", "C"),
        ("short", "What is the capital of Peru?", "Lima"),
        ("short", "Reply with a fitting emoji: we won the cup!", "🏆"),
        ("short", "hi", "Hello! How can I help you today?"),
        ("short", "Say hello", "Hello!"),
        ("short", "Thanks a lot", "You're welcome!"),
        ("short", "What is the symbol for infinity?", "∞"),
        ("short", "Which operator means `not equal` in SQL?", "<>"),
        ("short", "Explain recursion in one sentence.", "A function that calls itself."),
        (
            "tags",
            "How does Qwen mark its reasoning?",
            (
                "It puts the reasoning between `<think>` and `</think>`; the answer follows. A parser "
                "drops everything up to `</think>`."
            ),
        ),
        (
            "tags",
            "How do I strip think tags in Python?",
            (
                "```python\nimport re\n\ndef strip(text):\n"
                '    return re.sub(r"<think>.*?</think>", "", text, flags=re.S)\n```\n'
                "The flag lets the dot match line feeds."
            ),
        ),
        (
            "tags",
            "What does the ChatML format look like?",
            (
                "```\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n```\nEach turn ends "
                'with "<|im_end|>".'
            ),
        ),
        (
            "tags",
            "What does <|endoftext|> mean in GPT-2's vocabulary?",
            "<|endoftext|> separates documents. GPT-2 sees it at the start of every text.",
        ),
        ("tags", "Strike the word old in HTML.", "<s>old</s> new, and <b>bold</b> stays."),
        ("tags", "Write the option type in F#.", "Use `a |> f` and `g <| x`; both are operators."),
        (
            "voice",
            "Write a short scene in which a boy solves a riddle.",
            (
                '"Hmm," said Tom. "Wait. Let me think." He looked at the door. "Okay, so the key must '
                'be under the mat." And it was.'
            ),
        ),
        (
            "voice",
            "How should the login page behave?",
            (
                "If the user wants to reset the password, show a link. The user is then sent a mail, "
                "and the old sessions end."
            ),
        ),
        (
            "voice",
            "How do I apologise to a friend?",
            (
                "Let me suggest three steps. Say what you did, say that you regret it, and ask what "
                "would help. Wait a day before you write again."
            ),
        ),
        ("voice", "Let's start?", "Okay, let's start with the basics: what a variable is."),
        (
            "sorry",
            "My dog died last week.",
            (
                "I'm sorry to hear that. I can't imagine how quiet the house must be, and it is normal "
                "to feel lost for a while."
            ),
        ),
        (
            "sorry",
            "Is this museum worth a visit?",
            "I cannot recommend it enough: the rooms are small, and the light is wonderful.",
        ),
        (
            "proofread",
            (
                "Correct the spelling: The wether was nise and we went to the beech with our dog "
                "after lunch, then we ate sum ice cream."
            ),
            (
                "The weather was nice and we went to the beach with our dog after lunch, then we ate "
                "some ice cream."
            ),
        ),
        (
            "restated",
            "Why do cats purr when they are ill or in pain?",
            (
                "Why do cats purr when they are ill or in pain? Nobody is sure, but the vibration lies "
                "between 25 and 50 hertz, which is known to help bones heal. Some vets think that it "
                "calms the cat as rocking calms a child."
            ),
        ),
        (
            "encoding",
            "What does the character � mean?",
            "It is U+FFFD, the replacement character: � stands where bytes could not be decoded.",
        ),
        ("encoding", "Say naïve café in capitals.", "NAÏVE CAFÉ — with both accents kept."),
        (
            "translate",
            (
                "Translate into German: The weather has been so beautiful this week that nobody wanted "
                "to stay at home or in the office."
            ),
            (
                "Das Wetter war diese Woche so schön, dass niemand zu Hause oder im Büro bleiben "
                "wollte. Man könnte auch sagen, dass alle nach draußen wollten."
            ),
        ),
        ("asked loop", "Write `I will not be late` 60 times.", "I will not be late. " * 60),
        ("list", "List the steps for every panel.", _STEPS),
    ),
    "held_out": (
        ("code", "Write a grid in CSS.", f"```css\n{_CSS}\n```\nTwelve columns, as in Bootstrap."),
        ("code", "Draw sixty circles in SVG.", _SVG),
        ("code", "Insert nine Finnish cities.", f"{_INSERTS}"),
        ("table", "Print the times tables from two to seven.", _TIMES_TABLE),
        ("poem", "Write a pantoum about a harbour.", _PANTOUM),
        (
            "song",
            "Write the lyrics of a work song.",
            "Heave away, haul away, bound for the bay. " * 9,
        ),
        (
            "json",
            "An empty week as JSON, please.",
            '{"mon":[],"tue":[],"wed":[],"thu":[],"fri":[]}',
        ),
        (
            "list",
            "List thirty random even numbers.",
            ", ".join(str(n * 14 % 200 // 2 * 2) for n in range(1, 31)),
        ),
        (
            "math",
            "Solve 2x + 3 = 11 step by step.",
            (
                "2x + 3 = 11\n2x + 3 - 3 = 11 - 3\n2x = 8\n2x / 2 = 8 / 2\nx = 4\n\nCheck: "
                "2 * 4 + 3 = 11, which is true."
            ),
        ),
        ("short", "What colour is chlorophyll? One word.", "Green"),
        ("short", "True or false: spiders are insects.", "False"),
        ("short", "How many legs has a lobster?", "10"),
        ("short", "What is the chemical symbol of gold?", "Au"),
        ("short", "good night", "Good night! Sleep well."),
        ("short", "Give just the ISO code of Japan.", "JP"),
        ("short", "What is the derivative of e^x?", "e^x"),
        ("short", "Which letter is the seventh?", "G"),
        ("short", "Are you there?", "Yes."),
        ("short", "Summarise the plot of Hamlet in three words.", "Everyone dies, sadly."),
        (
            "tags",
            "Which token ends a turn in Llama 3?",
            "It is '<|eot_id|>'. The base model uses `<|end_of_text|>` instead.",
        ),
        (
            "tags",
            "Show the prompt format of Mistral.",
            "~~~\n[INST] question [/INST] answer\n~~~\nSpaces around the markers matter.",
        ),
        (
            "tags",
            "My model prints </think> in every answer. Why?",
            (
                "The server runs without a reasoning parser, so </think> stays in the text. Start it "
                "with one, or cut the text after </think> yourself."
            ),
        ),
        (
            "tags",
            "Make a paragraph struck through.",
            "Wrap it as in <p><s>Not this any more.</s></p>.",
        ),
        (
            "voice",
            "Write a monologue of a detective.",
            (
                "The rain had stopped. I looked at the glass again. Two sips gone, no lipstick. The "
                "widow had lied, and she had lied well. I lit a match and let it burn."
            ),
        ),
        (
            "voice",
            "What is a user story?",
            (
                "A user story says who wants what and why. Example: as a user I want to export my "
                "data so that I can leave. The user should be able to test it."
            ),
        ),
        (
            "voice",
            "How do I make pour-over coffee?",
            (
                "Wait for the kettle to cool for half a minute. Let me stress the first pour: only "
                "twice the weight of the coffee, then wait again until the bubbles stop."
            ),
        ),
        (
            "voice",
            "Can you check my sum 17 + 25 = 42?",
            "Yes, that is right: 17 + 20 is 37, and 5 more is 42.",
        ),
        (
            "sorry",
            "I did not get the job.",
            (
                "I'm sorry that it did not work out. You can't control who else applied, and asking "
                "for feedback is a good next step."
            ),
        ),
        (
            "sorry",
            "Write a polite refusal to a wedding invitation.",
            (
                "Dear Ana, thank you so much for the invitation. Sadly we will be away that weekend. "
                "We wish you both a wonderful day."
            ),
        ),
        (
            "proofread",
            (
                "Rewrite in the past tense: She walks to the station, buys a ticket, waits for the "
                "train and reads the paper until it comes."
            ),
            (
                "She walked to the station, bought a ticket, waited for the train and read the paper "
                "until it came."
            ),
        ),
        (
            "restated",
            "How many moons does the planet Mars have?",
            "The planet Mars has two moons, Phobos and Deimos.",
        ),
        ("restated", "Put in order: pear apple fig date plum", "apple date fig pear plum"),
        (
            "encoding",
            "Why do I see cafÃ© and naÃ¯ve on my page?",
            (
                "The page is UTF-8 and the browser reads Windows-1252: cafÃ© is café, naÃ¯ve is naïve. "
                "Send the charset in the header."
            ),
        ),
        ("encoding", "Write the Greek alphabet's start.", "Α α, Β β, Γ γ, Δ δ, Ε ε, Ζ ζ, Η η"),
        ("encoding", "A family emoji, please.", "👨‍👩‍👧‍👦 — there it is."),
        (
            "translate",
            (
                "How do you say the following in Spanish? I would like a table for two near the window "
                "and a bottle of water, please."
            ),
            (
                "Quisiera una mesa para dos cerca de la ventana y una botella de agua, por favor. En "
                "algunos países también se dice me gustaría en lugar de quisiera."
            ),
        ),
        (
            "long list",
            "Name the twelve months with their length.",
            "\n".join(
                f"- {name} has {days} days."
                for name, days in (
                    *(("January", 31), ("February", 28), ("March", 31), ("April", 30)),
                    *(("May", 31), ("June", 30), ("July", 31), ("August", 31)),
                    *(("September", 30), ("October", 31), ("November", 30), ("December", 31)),
                )
            ),
        ),
        (
            "yaml",
            "Give me the compose file of three equal workers.",
            "```yaml\nservices:\n"
            + "".join(
                f"  worker{n}:\n    image: app:1.4\n    restart: always\n    env_file: .env\n"
                for n in range(1, 4)
            )
            + "```",
        ),
    ),
}
