"""Print the rows of a folder that `speculators prepare-data` wrote.

usage: python load_speculators.py FOLDER
"""

import json
import sys

from datasets import load_from_disk

rows = load_from_disk(sys.argv[1]).with_format(None)
print(json.dumps([{name: row[name] for name in ("input_ids", "loss_mask")} for row in rows]))
