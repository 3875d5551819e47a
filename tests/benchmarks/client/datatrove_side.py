"""The same rows with datatrove; runs in an environment that has it and nothing of this project.

usage: python datatrove_side.py PROMPTS OUTPUT IN_FLIGHT URL...

One task and one process per server, with checkpoints, so that a killed run can be resumed.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.writers import JsonlWriter


class Prompts(PipelineStep):
    """Read this rank's share of the prompts."""

    name = "prompts"
    type = "reader"

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def run(self, data=None, rank=0, world_size=1):  # noqa: ANN001, ANN201 - datatrove's own
        table = pq.read_table(self.path)
        rows = zip(table["id"].to_pylist(), table["prompt"].to_pylist(), strict=True)
        for number, (row_id, prompt) in enumerate(rows):
            if number % world_size == rank:
                yield Document(text=prompt, id=row_id)


class ByRank(PipelineStep):
    """Send each rank's rows to a server of its own."""

    name = "inference by rank"
    type = "inference"

    def __init__(self, output: str, in_flight: int, urls: list[str]) -> None:
        super().__init__()
        self.output, self.in_flight, self.urls = output, in_flight, urls

    def run(self, data=None, rank=0, world_size=1):  # noqa: ANN001, ANN201 - datatrove's own
        async def rollout(document, generate):  # noqa: ANN001, ANN202 - datatrove's own
            message = {"role": "user", "content": document.text}
            return await generate({"messages": [message], "max_tokens": 60_000})

        runner = InferenceRunner(
            rollout_fn=rollout,
            config=InferenceConfig(
                server_type="endpoint",
                model_name_or_path="m",
                model_max_context=262_144,
                endpoint_url=self.urls[rank].removesuffix("/v1"),
                max_concurrent_generations=self.in_flight,
            ),
            output_writer=JsonlWriter(
                self.output, output_filename="${rank}_chunk_${chunk_index}.jsonl", compression=None
            ),
            checkpoints_local_dir=str(Path(self.output) / "checkpoints"),
            records_per_chunk=500,
        )
        runner.run(data, rank, world_size)
        return iter(())


if __name__ == "__main__":
    prompts, output, in_flight, *urls = sys.argv[1:]
    LocalPipelineExecutor(
        pipeline=[Prompts(prompts), ByRank(output, int(in_flight), urls)],
        tasks=len(urls),
        workers=len(urls),
        logging_dir=str(Path(output) / "logs"),
    ).run()
