"""A server is held to what was requested of it, at its first answers."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.engines.served import ServedEngine, known_model
from pipeline.engines.startup import TRIAL
from pipeline.engines.wire.answers import outcome_of
from pipeline.engines.wire.contract import Contract, KnownModel
from pipeline.engines.wire.transport import Response
from pipeline.models.thinking import THINK
from schemas.completion import Interruption, Outcome, Turn
from schemas.config.run_file import RunFile
from schemas.prompt import Request
from schemas.session import Breach
from tests.fakes.scripted_model import TEMPLATE
from tests.fakes.scripted_server import ScriptedServer, TokenIds, serving

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END, START, END_ID = "<|im_end|>", "<|im_start|>", len(BYTES)
PROMPT = f"{START}user\nSay hello.{END}\n{START}assistant\n"
SAID = "<think>\nA greeting.\n</think>\n\nHello, naïve 世界."


@dataclass(slots=True, kw_only=True)
class Site:
    """A model's folder, and a server's answers to the trial request."""

    folder: Path
    log: list[str] = field(default_factory=list)
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(BYTES)}, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(END), AddedToken(START)])
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        (self.folder / "chat_template.jinja").write_text(TEMPLATE)
        (self.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID]}))

    @property
    def model(self) -> KnownModel:
        values = {"prompts": {"path": "p"}, "output": {"folder": str(self.folder / "out")}}
        engine = {"kind": "endpoint", "base_urls": ["http://127.0.0.1:9/v1"]}
        config = RunFile.model_validate({**values, "model": str(self.folder), "engine": engine})
        return known_model(config)

    def contract(self, *accepted: Breach, model: KnownModel | None = None) -> Contract:
        known = model or self.model
        return Contract(
            wants_token_ids=True,
            read_model=lambda: known,
            accepted=frozenset(accepted),
            log=self.log.append,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def choice(self, said: str = SAID, finish: str = "stop", **changed: object) -> dict[str, Any]:
        """Return a choice as SGLang sends it with a reasoning parser."""
        thinking, _, answer = said.removeprefix("<think>\n").rpartition("\n</think>\n\n")
        message = {"role": "assistant", "content": answer, "reasoning_content": thinking or None}
        return {
            "message": message,
            "finish_reason": finish,
            "prompt_token_ids": self.ids(PROMPT),
            "response_token_ids": self.ids(f"{said}{END}" if finish == "stop" else said),
            "matched_stop": END_ID if finish == "stop" else None,
        } | changed


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(folder=tmp_path)


def judged(contract: Contract, choice: dict[str, Any], request: Request = TRIAL) -> Outcome:
    response = Response(status=200, headers={}, content=json.dumps({"choices": [choice]}).encode())
    turn = outcome_of(response, duration_s=1.0, opens_in_prompt=False, tags=THINK)
    assert isinstance(turn, Turn)
    return contract.outcome(request, {}, response, turn, opens_in_prompt=False)


def breach(contract: Contract, choice: dict[str, Any], request: Request = TRIAL) -> str:
    outcome = judged(contract, choice, request)
    assert isinstance(outcome, Interruption), outcome
    assert outcome.kind == "breach"
    return outcome.cause


def many(contract: Contract, *choices: dict[str, Any]) -> list[Outcome]:
    return [judged(contract, choice) for choice in choices]


# -- answers that are as requested


@pytest.mark.parametrize("said", [SAID, "No thinking.", "<think>\n\n</think>\n\nYes", "a < b\n\n"])
def test_answer_as_requested_is_a_turn(site: Site, said: str) -> None:
    assert isinstance(judged(site.contract(), site.choice(said)), Turn)


def test_answer_that_is_cut_is_a_turn(site: Site) -> None:
    cut = site.choice("<think>\nA gre", "length")
    assert isinstance(judged(site.contract(), cut), Turn)


def test_thinking_that_no_parser_took_out_is_as_requested(site: Site) -> None:
    choice = site.choice(message={"role": "assistant", "content": SAID})
    assert isinstance(judged(site.contract(), choice), Turn)


def test_answer_with_a_call_is_a_turn(site: Site) -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = site.choice("<tool_call>look</tool_call>", message=message, matched_stop=None)
    asked = replace(TRIAL, tools=({"type": "function", "function": {"name": "look"}},))
    called = choice | {"finish_reason": "tool_calls"}
    assert isinstance(judged(site.contract(), called, asked), Turn)


def test_token_that_the_tokenizer_puts_before_a_prompt_is_no_other_prompt(site: Site) -> None:
    choice = site.choice(prompt_token_ids=[END_ID, *site.ids(PROMPT)])
    assert isinstance(judged(site.contract(), choice), Turn)


def test_model_of_which_nothing_is_at_hand_is_held_to_having_ids(site: Site) -> None:
    contract = site.contract(model=KnownModel())
    ids = {"prompt_token_ids": [1], "response_token_ids": [2], "matched_stop": None}
    assert isinstance(judged(contract, site.choice() | ids), Turn)
    assert "no token ids" in breach(contract, site.choice() | dict.fromkeys(ids))


# -- breaches


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        (("prompt_token_ids", "response_token_ids"), "no token ids"),
        (("response_token_ids",), "token ids of the prompt alone"),
    ],
)
def test_missing_token_ids_name_the_release_that_has_them(
    site: Site, missing: tuple[str, ...], found: str
) -> None:
    contract = site.contract()
    contract.release = "sglang 0.5.16"
    cause = breach(contract, site.choice() | dict.fromkeys(missing))
    assert cause.startswith(f"its answers have {found}")
    for part in ("release 0.5.17", "this server is sglang 0.5.16", "--accept-missing-token-ids"):
        assert part in cause


def test_ids_that_were_not_requested_are_not_missing(site: Site) -> None:
    contract = site.contract()
    contract.wants_token_ids = False
    choice = site.choice(prompt_token_ids=None, response_token_ids=None)
    assert isinstance(judged(contract, choice), Turn)


def test_ids_of_another_text_show_both(site: Site) -> None:
    cause = breach(site.contract(), site.choice(response_token_ids=[*site.ids("Bye."), END_ID]))
    assert cause.startswith("the token ids of its answer are of another text")
    assert "'Bye.'" in cause
    assert "A greeting." in cause


def test_prompt_of_another_template_shows_where_they_differ(site: Site) -> None:
    theirs = PROMPT.replace(f"{START}user", f"{START}system\nBe kind.{END}\n{START}user")
    cause = breach(site.contract(), site.choice(prompt_token_ids=site.ids(theirs)))
    assert cause.startswith("its prompts are not those of the model's chat template")
    assert "Be kind." in cause


def test_prompt_that_a_clock_is_in_is_not_compared(site: Site) -> None:
    text = "{{ strftime_now('%Y') }}" + TEMPLATE
    (site.folder / "chat_template.jinja").write_text(text)
    choice = site.choice(prompt_token_ids=site.ids("2024" + PROMPT))
    assert isinstance(judged(site.contract(), choice), Turn)


@pytest.mark.parametrize("matched", [END_ID, None])
def test_end_token_is_missing_by_the_servers_word_or_the_models_file(
    site: Site, matched: int | None
) -> None:
    cut_off = site.choice(response_token_ids=site.ids(SAID), matched_stop=matched)
    assert "lack the end token" in breach(site.contract(), cut_off)


def test_text_that_stops_a_turn_is_no_end_token(site: Site) -> None:
    choice = site.choice(response_token_ids=site.ids(SAID), matched_stop="世界.")
    assert isinstance(judged(site.contract(), choice), Turn)
    plain = site.choice(response_token_ids=site.ids(SAID), matched_stop=None)
    stopped = replace(TRIAL, sampling=replace(TRIAL.sampling, stop=("世界.",)))
    assert isinstance(judged(site.contract(), plain, stopped), Turn)


def test_answers_that_end_with_many_ids_are_doubted_for_an_unknown_model(site: Site) -> None:
    contract = site.contract(model=KnownModel())
    answers = [
        site.choice(response_token_ids=[7, last], matched_stop=None)
        for last in (1, 2, 3, 4, 4, 5, 6)
    ]
    assert all(isinstance(outcome, Turn) for outcome in many(contract, *answers))
    (line,) = site.log
    assert line.startswith("event=engine_doubt fault=")
    assert "6 of them end with 5 different ids" in line


def test_prompts_without_ids_are_doubted_where_the_server_is_the_users(site: Site) -> None:
    without = site.choice(prompt_token_ids=None)
    assert "token ids of the completion alone" in breach(site.contract(), without)
    lenient = site.contract()
    lenient.requires_prompt_ids = False
    assert all(isinstance(outcome, Turn) for outcome in many(lenient, without, without))
    assert [line.split()[0] for line in site.log] == ["event=engine_doubt"]


def test_thinking_in_the_content_is_a_fault_only_with_a_parser(site: Site) -> None:
    contract = site.contract()
    contract.reasoning_parser = "deepseek-v3"
    inline = site.choice(message={"role": "assistant", "content": SAID})
    assert "--reasoning-parser deepseek-v3, but the thinking is in the content" in breach(
        contract, inline
    )
    other = site.contract()
    other.reasoning_parser = "qwen3"
    assert isinstance(judged(other, site.choice()), Turn)


# -- how long, and what is accepted


def test_fault_that_is_accepted_is_reported_once_and_others_are_not_accepted(site: Site) -> None:
    contract = site.contract("missing_token_ids")
    without = site.choice(prompt_token_ids=None, response_token_ids=None)
    assert all(isinstance(outcome, Turn) for outcome in many(contract, without, without))
    (line,) = site.log
    assert line.startswith("event=engine_fault_accepted fault='its answers have no token ids")
    breach(contract, site.choice(response_token_ids=[*site.ids("Bye."), END_ID]))


def test_only_the_first_answers_are_checked(site: Site) -> None:
    contract, good = site.contract(), site.choice()
    many(contract, *[good] * 15)
    assert not contract.is_settled
    many(contract, good)
    assert contract.is_settled
    assert isinstance(judged(contract, site.choice(response_token_ids=None)), Turn)


def test_no_answer_counts_after_one_that_breaks_the_contract(site: Site) -> None:
    contract = site.contract()
    cause = breach(contract, site.choice(response_token_ids=None))
    assert {breach(contract, site.choice()) for _ in range(20)} == {cause}


def test_fields_of_unknown_effect_leave_texts_unchecked(site: Site) -> None:
    contract = site.contract()
    contract.has_further_fields = True
    choice = site.choice(response_token_ids=site.ids("Bye."), prompt_token_ids=[1])
    assert isinstance(judged(contract, choice), Turn)
    assert "no token ids" in breach(
        contract, site.choice(response_token_ids=None, prompt_token_ids=None)
    )


# -- over HTTP


@pytest.mark.parametrize(
    ("returned", "has_end", "cause"),
    [
        ("all", True, None),
        ("prompt", True, "token ids of the prompt alone"),
        ("none", True, "no token ids"),
        ("all", False, "lack the end token"),
    ],
)
def test_endpoint_is_held_to_its_first_answer(
    tmp_path: Path, returned: TokenIds, has_end: bool, cause: str | None
) -> None:
    server = ScriptedServer(token_ids=returned, has_end_token=has_end)
    with serving(server):
        values = {"prompts": {"path": "p"}, "model": "m", "output": {"folder": str(tmp_path)}}
        engine = {"kind": "endpoint", "base_urls": [server.url]}
        config = RunFile.model_validate({**values, "engine": engine})
        served = ServedEngine(config=config, worker_number=0, log_path=tmp_path / "log")

        async def first() -> Outcome:
            await served.start()
            try:
                return await served.generate(TRIAL)
            finally:
                await served.stop()

        outcome = asyncio.run(first())
    if cause is None:
        assert isinstance(outcome, Turn)
    else:
        assert isinstance(outcome, Interruption)
        assert outcome.kind == "breach"
        assert cause in outcome.cause
