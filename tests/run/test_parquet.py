"""Parquet: the same records as in lines, and what is refused in one sentence."""

import chats
import pyarrow
import pyarrow.parquet
import pytest

from jax_fp8.run.records import fields_of, read_records


def write(path, rows, **options):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return path


def test_rows_are_records(tmp_path):
    rows = chats.conversations(600)
    path = write(tmp_path / "a.parquet", rows, row_group_size=50)
    found = list(read_records(path, "messages", "--data", ("tools",)))
    assert [record.fields for record in found] == [{"messages": row["messages"]} for row in rows]
    assert found[-1].where == f"row 600 of {path}"
    assert fields_of(path, "--data") == "messages, number"


def test_a_file_that_is_damaged_or_lacks_the_column(tmp_path):
    whole = write(tmp_path / "a.parquet", [{"text": "a" * 1000, "number": n} for n in range(2000)]).read_bytes()
    cases = {
        "empty": b"", "no parquet": b"PAR1" * 9, "half": whole[: len(whole) // 2], "no beginning": whole[500:],
        "damaged": whole[:60] + bytes(500) + whole[560:],
    }  # fmt: skip
    for content in cases.values():
        (tmp_path / "b.parquet").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"--data must hold records with a field 'text', got .* in .*b.parquet"
        ) as e:
            list(read_records(tmp_path / "b.parquet", "text", "--data"))
        assert len(str(e.value).splitlines()) == 1
    with pytest.raises(ValueError, match="with a field 'messages', got the columns text, number in"):
        list(read_records(tmp_path / "a.parquet", "messages", "--data"))
