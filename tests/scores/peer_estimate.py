"""The estimate beside aiconfigurator's, on the measured readings.

`make estimate-peer` builds one environment without a GPU (about 850 MB, outside the checkout, which
Ray ships), asks aiconfigurator about every measured reading, and prints the errors of both where it
answers. `--stored` takes its answers from `tests/data/throughput/peer.jsonl` instead, and `--write`
rewrites that file. It exits with 1 where ours is not closer on all rows that both answer.

A reading with its prefill is asked as continuous batching (`agg`), a window of decoding alone as
`static_gen`. Both are given the same accept length. Its tables are of one release an engine, and
often newer than the reading. Ours is predicted without any reading of its pair of model, card and
engine.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.models.dtypes import load_model_as
from pipeline.planner.rate.errors import RATE_CLASSES
from pipeline.planner.rate.point import PointQuery, rate_at_point
from pipeline.planner.rate.readings.stored import readings as published
from pipeline.planner.rate.readings.traits import ENGINES
from pipeline.planner.rate.throughput import Rate
from tests.scores.score_estimate import without_their_pair
from tests.scores.throughput_readings import scored

DATA = Path(__file__).parents[1] / "data" / "throughput"
PEER_SIDE = Path(__file__).with_name("peer_side.py")
PACKAGE = "aiconfigurator"
VERSION = "0.12.0"
# Above this share of the clients nobody queues, and the clients are what its batch size means.
NO_QUEUE_FRACTION = 0.8

# Our names of cards → its systems. Others it does not know.
SYSTEMS = {
    "a100_80_sxm": "a100_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200",
    "gb300": "gb300", "h100_sxm": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s",
    "rtx_pro_6000": "rtx_pro_6000_server",
}  # fmt: skip

# Checkpoints of readings → the one of the same shapes whose config it carries.
SAME_SHAPES = {
    "Qwen/Qwen3.6-27B": "Qwen/Qwen3.5-27B",
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "QuantTrio/Qwen3.5-397B-A17B-AWQ": "Qwen/Qwen3.5-397B-A17B",
    "lukealonso/Qwen3.5-397B-A17B-NVFP4": "nvidia/Qwen3.5-397B-A17B-NVFP4",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "deepseek-ai/DeepSeek-V3.2-Exp": "deepseek-ai/DeepSeek-V3.2",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
# Where it carries the quantised checkpoint itself.
QUANTISED = {
    ("Qwen/Qwen3.5-27B", "nvfp4-w4a16"): "nvidia/Qwen3.6-27B-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "nvfp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("MiniMaxAI/MiniMax-M2.5", "nvfp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("deepseek-ai/DeepSeek-R1", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("meta-llama/Meta-Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("moonshotai/Kimi-K2.5", "nvfp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("zai-org/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
}
# Checkpoints that it carries in bf16 and is told to compute in the reading's format.
TOLD_MODES = {
    ("Qwen/Qwen3-32B", "nvfp4"): "nvfp4",
    ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "fp8"): "fp8_block",
    ("Qwen/Qwen3.5-27B", "fp8"): "fp8_block",
    ("Qwen/Qwen3.5-35B-A3B", "fp8"): "fp8_block",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "fp8_block",
    ("Qwen/Qwen3.5-397B-A17B", "int4-awq"): "int4_wo",
    ("meta-llama/Meta-Llama-3.1-8B", "fp8"): "fp8",
}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured reading, what ours says, and what aiconfigurator answers."""

    reading: Row
    ours: Rate
    our_tokens_per_s: float
    """Predicted without the readings of its pair, where the fit knows them."""
    peer: Row

    @property
    def answered(self) -> bool:
        """Whether aiconfigurator gives a rate."""
        return "tokens_per_s_per_gpu" in self.peer

    def our_error(self) -> float:
        """Percent off the reading."""
        return _off(self.our_tokens_per_s, self.reading)

    def peer_error(self) -> float:
        """Percent off the reading."""
        return _off(self.peer["tokens_per_s_per_gpu"], self.reading)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both sides; 1 where ours is not closer on all rows that both answer."""
    parser = argparse.ArgumentParser(description="Compare the estimate with aiconfigurator's.")
    parser.add_argument("--stored", action="store_true", help="take its answers from the file")
    parser.add_argument("--write", action="store_true", help="rewrite the file with its answers")
    parser.add_argument("--rows", action="store_true", help="print every row that both answer")
    parser.add_argument(
        "--environments", type=Path, default=Path.home() / ".cache" / "regenerate-peer"
    )
    options = parser.parse_args(argv)
    readings = list(published())
    ours = [our_rate(reading) for reading in readings]
    if options.stored:
        answers = _stored(readings)
    else:
        answers = _asked(_environment(options.environments.resolve()), readings, ours)
    if options.write:
        lines = [json.dumps(answer, separators=(",", ":")) for answer in answers]
        (DATA / "peer.jsonl").write_text("\n".join(lines) + "\n")
    unseen = {
        row.reading.row["id"]: row.reading.row["tokens_per_s_per_gpu"] / math.exp(row.error)
        for row in without_their_pair(scored())
    }
    compared = [
        Compared(
            reading=reading,
            ours=rate,
            our_tokens_per_s=unseen.get(reading["id"], our_tokens_per_s(reading, rate)),
            peer=answer,
        )
        for reading, rate, answer in zip(readings, ours, answers, strict=True)
    ]
    return _report(compared, every_row=options.rows)


def _rows(name: str) -> Iterator[Row]:
    for line in (DATA / name).read_text().splitlines():
        yield json.loads(line)


def _off(tokens_per_s: float, reading: Row) -> float:
    return abs(tokens_per_s / float(reading["tokens_per_s_per_gpu"]) - 1) * 100


# --- our side ---------------------------------------------------------------------------------


def our_rate(reading: Row) -> Rate:
    """What the estimate says about a reading, at the batch that ran."""
    return rate_at_point(
        PointQuery(
            model=load_model_as(reading["model"], reading["dtype"]),
            gpu=reading["gpu"],
            num_gpus=reading["num_gpus"],
            tp_size=reading["tp_size"],
            dp_size=reading["dp_size"],
            running_requests=reading["running_requests"],
            input_tokens=reading["input_tokens"],
            output_tokens=reading["output_tokens"],
            accept_length=reading["accept_length"],
            num_draft_tokens=reading["num_draft_tokens"],
            sglang_version=reading["version"] if reading["engine"] == "sglang" else None,
            attention_backend=reading["attention_backend"],
            engine=reading["engine"],
            kv_format=reading["kv_dtype"],
        )
    )


def our_tokens_per_s(reading: Row, rate: Rate) -> float:
    """The median for one GPU; of decoding alone where the reading is."""
    whole = rate.tokens_per_s_per_gpu.p50
    return whole if reading["prefill_included"] else whole / (1 - rate.prefill_share)


# --- their side -------------------------------------------------------------------------------


def peer_arguments(reading: Row, accept_length: float) -> dict[str, Any] | None:
    """The reading in aiconfigurator's words; None for a card that it lacks."""
    system = SYSTEMS.get(reading["gpu"])
    if system is None:
        return None
    name, dtype = str(reading["model"]), str(reading["dtype"])
    model = SAME_SHAPES.get(name, name)
    form = (model, dtype)
    tp_size, dp_size, ep_size = reading["tp_size"], reading["dp_size"], reading["ep_size"]
    asked: dict[str, Any] = {
        "model_path": QUANTISED.get(form, model),
        "system_name": system,
        "backend_name": reading["engine"],
        "mode": "agg" if reading["prefill_included"] else "static_gen",
        "isl": max(reading["input_tokens"], 1),
        "osl": reading["output_tokens"],
        "batch_size": max(round(_requests_at_once(reading) / dp_size), 1),
        "tp_size": tp_size // dp_size,
        "attention_dp_size": dp_size,
        "moe_tp_size": tp_size // ep_size,
        "moe_ep_size": ep_size,
    }
    if form in TOLD_MODES:
        asked["gemm_quant_mode"] = asked["moe_quant_mode"] = TOLD_MODES[form]
    if reading["kv_dtype"]:
        asked["kvcache_quant_mode"] = reading["kv_dtype"]
    if reading["mtp"]:
        asked["nextn"] = reading["num_draft_tokens"] - 1
        asked["nextn_accepted"] = round(accept_length - 1, 3)
    return asked


def _requests_at_once(reading: Row) -> float:
    """Its batch size counts those in prefill too; a queue is none of it."""
    clients, running = float(reading["concurrency"]), float(reading["running_requests"])
    return clients if running >= NO_QUEUE_FRACTION * clients else running


def _environment(root: Path) -> Path:
    """The interpreter of the side environment, built on first use."""
    folder = root / f"{PACKAGE}-{VERSION}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
        (folder / "installed").touch()
    return python


def _asked(python: Path, readings: Sequence[Row], ours: Sequence[Rate]) -> list[Row]:
    """Its answers in one process, readings of one system after another: it loads tables once."""
    asked = [
        (reading["id"], peer_arguments(reading, rate.accept_length))
        for reading, rate in zip(readings, ours, strict=True)
    ]
    known = [(row_id, arguments) for row_id, arguments in asked if arguments is not None]
    known.sort(key=lambda item: [item[1][key] for key in ("system_name", "backend_name")])
    done = subprocess.run(
        [str(python), "-W", "ignore", str(PEER_SIDE)],
        input="".join(json.dumps(arguments) + "\n" for _, arguments in known),
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEER ")]
    if len(lines) != len(known):
        raise SystemExit(f"{PACKAGE} stopped after {len(lines)} of {len(known)} points")
    found = {
        row_id: {**_told(arguments), **json.loads(line.removeprefix("PEER "))}
        for (row_id, arguments), line in zip(known, lines, strict=True)
    }
    missing = {"refused": "no such card"}
    return [{"id": row_id, "version": VERSION, **found.get(row_id, missing)} for row_id, _ in asked]


def _told(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the stored table keeps of a question."""
    kept = {key: arguments[key] for key in ("model_path", "system_name", "mode", "batch_size")}
    if "nextn" in arguments:
        kept["accept_length"] = round(1 + arguments["nextn_accepted"], 3)
    return kept


def _stored(readings: Sequence[Row]) -> list[Row]:
    by_id = {row["id"]: row for row in _rows("peer.jsonl")}
    not_asked = {"refused": "not asked yet: use --write"}
    return [by_id.get(reading["id"], {"id": reading["id"], **not_asked}) for reading in readings]


# --- printing ---------------------------------------------------------------------------------


def _report(compared: Sequence[Compared], *, every_row: bool) -> int:
    both = [row for row in compared if row.answered]
    print(f"{PACKAGE} {VERSION} beside ours, median error on the readings that it answers\n")
    print(f"  {'':<26}{'readings':>9}{'answered':>9}{'theirs %':>10}{'ours %':>8}   closer")
    for name, of_class in _classes():
        members = [row for row in compared if of_class(row)]
        if members:
            print(_class_line(name, members))
    elsewhere = sum(_asked_elsewhere(row) for row in both)
    if elsewhere:
        print(f"\n{elsewhere} readings with MTP were asked at another accept length: use --write")
    refused = Counter(row.peer["refused"] for row in compared if not row.answered)
    print("\nnot answered: " + ", ".join(f"{n} {why}" for why, n in refused.most_common()))
    if every_row:
        print()
        for row in both:
            print(_row_line(row))
    return 0 if both and _median_ours(both) < _median_theirs(both) else 1


def _asked_elsewhere(row: Compared) -> bool:
    """A stored answer keeps the accept length of its day."""
    told = float(row.peer.get("accept_length", row.ours.accept_length))
    return abs(told - row.ours.accept_length) > 0.01


def _classes() -> Iterator[tuple[str, Callable[[Compared], bool]]]:
    for name in RATE_CLASSES:
        yield name, lambda row, name=name: row.ours.rate_class == name  # type: ignore[misc]  # bound here
    yield "without MTP", lambda row: not row.reading["mtp"]
    yield "with MTP", lambda row: row.reading["mtp"]
    yield "with prefill", lambda row: row.reading["prefill_included"]
    yield "decoding alone", lambda row: not row.reading["prefill_included"]
    for engine in ENGINES:
        yield engine, lambda row, engine=engine: row.reading["engine"] == engine  # type: ignore[misc]  # bound here
        for name in RATE_CLASSES:
            yield (
                f"  {name}",
                lambda row, name=name, engine=engine: (  # type: ignore[misc]  # bound here
                    (row.reading["engine"], row.ours.rate_class) == (engine, name)
                ),
            )
    yield "all measured", lambda row: True


def _class_line(name: str, members: Sequence[Compared]) -> str:
    both = [row for row in members if row.answered]
    line = f"  {name:<26}{len(members):>9}{len(both):>9}"
    if not both:
        return line
    theirs, ours = _median_theirs(both), _median_ours(both)
    closer = sum(row.our_error() < row.peer_error() for row in both)
    return f"{line}{theirs:>10.1f}{ours:>8.1f}   ours on {closer} of {len(both)}"


def _median_theirs(both: Sequence[Compared]) -> float:
    return statistics.median(row.peer_error() for row in both)


def _median_ours(both: Sequence[Compared]) -> float:
    return statistics.median(row.our_error() for row in both)


def _row_line(row: Compared) -> str:
    reading = row.reading
    measured = float(reading["tokens_per_s_per_gpu"])
    ours = row.our_tokens_per_s
    theirs = float(row.peer["tokens_per_s_per_gpu"])
    what = (
        f"{reading['model'].rpartition('/')[2]} {reading['dtype']} {reading['num_gpus']} x "
        f"{reading['gpu']} {reading['engine']} at {reading['running_requests']:g}"
    )
    ratios = f"theirs {theirs / measured:.2f}, ours {ours / measured:.2f}"
    return f"  {reading['id']:<26}{what:<74}{measured:>9.1f} tok/s: {ratios}"


if __name__ == "__main__":
    sys.exit(main())
