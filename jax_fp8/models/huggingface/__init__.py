"""Models of Hugging Face, in and out: config.json ↔ GPTConfig, their tensors ↔ params.

families.py      the families, with the defaults of missing fields and the fields that must have one value
config_json.py   a config.json becomes a GPTConfig or is refused, and back
reading.py       the fields of a GPTConfig from those of a config.json, for each family
writing.py       the other way
rotary_fields.py the same for rotary positions and their scaling
fields.py        the fields of a config.json, with their types
layouts.py       a table for each family: the names of tensors in files, and their params
naming.py        names of tensors that differ from file to file, and tied heads
quantized.py     weights in FP8 with a scale for each square
weights.py       reads and writes the files
json_files.py    JSON files beside the tensors
peft.py          adapters in the layout of PEFT, in and out
peft_config.py   their adapter_config.json: what its fields say, and which are refused
"""
