"""Load a file as SpecForge's online training does, and print the rows that reach the trainer.

usage: python load_specforge.py FILE TOKENIZER TEMPLATE MAX_LENGTH [last]
"""

import contextlib
import json
import sys

from specforge.data.prompt_builder import prepare_prompt_tasks
from transformers import AutoTokenizer

path, folder, template, max_length, *last = sys.argv[1:]
with contextlib.redirect_stdout(sys.stderr):
    tasks = prepare_prompt_tasks(
        path,
        AutoTokenizer.from_pretrained(folder),
        chat_template=template,
        max_length=int(max_length),
        is_preformatted=False,
        train_only_last_turn=bool(last),
        cache_dir=None,
        cache_key=None,
        num_proc=1,
    )
    rows = [task["payload"] for task in tasks]
print(json.dumps(rows))
