"""A loop over `openai.AsyncOpenAI` with its defaults, one process per server, that keeps nothing.

usage: python -m tests.benchmarks.client.bare_openai PROMPTS IN_FLIGHT URL...
"""

import asyncio
import multiprocessing
import sys

import openai
import pyarrow.parquet as pq


async def ask(prompts: list[str], in_flight: int, url: str) -> None:
    places = asyncio.Semaphore(in_flight)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:

        async def one(prompt: str) -> None:
            async with places:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": prompt}], max_tokens=60_000
                )

        await asyncio.gather(*map(one, prompts))


def main(path: str, in_flight: int, urls: list[str]) -> None:
    prompts = pq.read_table(path)["prompt"].to_pylist()
    processes = [
        multiprocessing.Process(target=_run, args=(prompts[n :: len(urls)], in_flight, url))
        for n, url in enumerate(urls)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _run(prompts: list[str], in_flight: int, url: str) -> None:
    asyncio.run(ask(prompts, in_flight, url))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
