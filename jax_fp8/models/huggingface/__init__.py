"""Models of Hugging Face, in and out: config.json ↔ GPTConfig, their tensors ↔ params.

config_json.py   the families, and how their config.json becomes a GPTConfig or is refused
fields.py        the fields of a config.json, with their types and defaults
layouts.py       a table for each family: the names of tensors in files, and their params
weights.py       reads and writes the files
"""
