"""Models of Hugging Face, in and out: config.json ↔ GPTConfig, their tensors ↔ params.

config_json.py   which families there are, and what of a config.json makes a GPTConfig, or is refused
layouts.py       a table for each family: the tensor in a file, and the params that it is
weights.py       files in and out
"""
