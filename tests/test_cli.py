"""`python -m jax_fp8`: the tuner, the report, exit codes, and one sentence for what does not exist."""

import importlib.metadata
import subprocess
import sys

import h200
import pytest
import run_logs

from jax_fp8 import cli
from jax_fp8.kernels import extension
from jax_fp8.models.config import GPTConfig
from jax_fp8.plan import gpt_plans
from jax_fp8.plan.rates import RateTable
from jax_fp8.tune import tune
from jax_fp8.tune.gemm_table import GemmTable


def test_no_command_lists_the_commands(capsys):
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m jax_fp8 ")
    for command in ("doctor", "train", "generate", "export", "tune", "plan", "report", "convert"):
        assert f"\n    {command} " in printed


def test_help_of_convert_shows_its_whole_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m jax_fp8 convert --from huggingface FOLDER --to FILE\n")
    assert "\n       python -m jax_fp8 convert --from FILE --to huggingface FOLDER\n" in printed


@pytest.mark.versions
def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jax_fp8 {importlib.metadata.version('jax_fp8')}\n"


def test_tuning_without_a_gpu_is_one_sentence(capsys):
    assert cli.main(["tune", "--preset", "gpt3-1.3b"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert "tuned on the GPU that will run them, got platform 'cpu'" in printed.err


class FakeTuner:
    """Knows every GEMM's best, without measuring."""

    def __init__(self, problem):
        self.problem = problem

    def error(self, candidate):
        return 0.5

    def seconds(self, candidate):
        return 1e-4 * (0.8 if candidate == 3 else 1)


@pytest.fixture
def on_a_gpu_of_ones_own(monkeypatch, with_kernels, tmp_path):
    """A machine whose GEMMs need no measuring."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "GemmBench", FakeTuner)
    for module in (cli, tune):
        monkeypatch.setattr(module, "this_gpu", lambda: ("NVIDIA H200", "13.1.0"))
    yield tmp_path / "jax_fp8/gemm/NVIDIA_H200-cublaslt-13.1.0.json"


@pytest.mark.versions
def test_tuning_a_preset(on_a_gpu_of_ones_own, capsys):
    for _ in range(2):  # the second finds all in the file, and shows it
        assert cli.main(["tune", "--preset", "tiny", "--batch", "4", "--microbatches", "2"]) == 0
        printed = capsys.readouterr().out
        assert printed.count("25.0%") == 12 and str(on_a_gpu_of_ones_own) in printed
    problems = [problem for problem, _ in GemmTable.load(on_a_gpu_of_ones_own).choices]
    width, tokens = 128, 2 * 128
    assert len(problems) == 12  # fprop, dgrad and wgrad of qkv, attention output, MLP up, MLP down
    assert {p.n for p in problems if p.m == tokens and p.has_bias} == {
        width,
        4 * width,
    }  # queries, keys and values apart
    # The gradients of small kernels side by side are made together, and added after it.
    added = {p.n: p.has_c for p in problems if p.dtype == "float32"}
    assert added == {3 * width: False, width: True, 4 * width: True}
    assert {p.accumulation for p in problems if p.has_bias} == {"fast"}
    assert {p.accumulation for p in problems if not p.has_bias} == {"split"}


def test_tuning_what_else_a_step_may_be_made_of(on_a_gpu_of_ones_own, capsys):
    assert cli.main(["tune", "--preset", "tiny", "--fast", "--fp8-head"]) == 0
    problems = [problem for problem, _ in GemmTable.load(on_a_gpu_of_ones_own).choices]
    vocabulary = GPTConfig.preset("tiny").vocab_size
    of_head = [p for p in problems if vocabulary in (p.m, p.n, p.k)]
    assert sorted(p.accumulation for p in of_head) == ["fast", "split", "split"]
    assert {p.accumulation for p in problems if p not in of_head} == {"fast"}
    assert {p.dtype for p in problems if p.k == 8 * 128} == {"float32"}  # weight gradients


def test_tuning_products_by_tile(on_a_gpu_of_ones_own, capsys):
    assert cli.main(["tune", "--preset", "tiny", "--recipe", "block", "--fp8-head"]) == 0
    problems = [problem for problem, _ in GemmTable.load(on_a_gpu_of_ones_own).choices]
    assert {p.accumulation for p in problems} == {"1d2d", "2d1d"}  # the head's weight gradient is of squares by lines
    assert any(p.n == GPTConfig.preset("tiny").vocab_size for p in problems)
    assert cli.main(["tune", "--preset", "tiny", "--recipe", "block", "--fast"]) == 1
    assert "got --recipe block, which scales the sum of every 128" in capsys.readouterr().err


def test_tuning_for_bfloat16_params(on_a_gpu_of_ones_own, capsys):
    """Their gradients are written in bfloat16, which is another product."""
    assert cli.main(["tune", "--preset", "tiny", "--bf16-params"]) == 0
    problems = [problem for problem, _ in GemmTable.load(on_a_gpu_of_ones_own).choices]
    assert {p.dtype for p in problems if p.k == 8 * 128} == {"bfloat16"}


def test_measuring_rates(on_a_gpu_of_ones_own, monkeypatch, capsys):
    """What one GPU can be asked for is new; the rest is as it was, and keeps its source."""
    path = on_a_gpu_of_ones_own.with_name("rates.json")
    for memory in (3e12, 4e12):
        monkeypatch.setattr(cli, "measure_rates", lambda report, memory=memory: {"memory": memory})
        assert cli.main(["tune", "--rates", str(path)]) == 0
        table, before = RateTable.load(path), RateTable.for_gpu("h200")
        assert table.rates.memory == memory and table.gpu == "NVIDIA H200"
        assert table.sources["memory"].startswith("python -m jax_fp8 tune --rates, 20")
        assert {**table.sources, "memory": ""} == {**before.sources, "memory": ""}
    printed = capsys.readouterr().out
    assert str(path) in printed and "Not measured" in printed and "between_hosts" in printed


def test_measuring_rates_without_a_gpu_is_one_sentence(capsys, tmp_path):
    assert cli.main(["tune", "--rates", str(tmp_path / "rates.json")]) == 1
    printed = capsys.readouterr()
    assert "got platform 'cpu'" in printed.err and printed.err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_batch_that_does_not_split_is_one_sentence(on_a_gpu_of_ones_own, capsys):
    for argv in (["--microbatches", "3"], ["--sequence", "129"], ["--batch", "0"]):
        assert cli.main(["tune", "--preset", "tiny", *argv]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and "must split into microbatches" in printed.err
    assert not on_a_gpu_of_ones_own.exists()


def test_a_report_of_a_run(tmp_path, capsys):
    run_logs.healthy(layers=1, count=4).write(tmp_path / "mine")
    for output in (tmp_path / "mine/report.html", tmp_path / "page.html"):
        argv = [] if output.name == "report.html" else ["--output", str(output)]
        assert cli.main(["report", str(tmp_path / "mine"), *argv]) == 0
        assert capsys.readouterr().out.startswith(f"{output}: ")
        assert "<h1>mine</h1>" in output.read_text()


def test_a_report_of_a_run_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_logs.healthy(layers=1, count=4).write(tmp_path / "runs/mine")
    assert cli.main(["report", "mine"]) == 0
    assert capsys.readouterr().out.startswith("runs/mine/report.html: ")
    run_logs.healthy(layers=1, count=4).write(tmp_path / "mine")
    assert cli.main(["report", "mine"]) == 0
    assert capsys.readouterr().out.startswith("mine/report.html: ")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and not list(tmp_path.iterdir())
    assert printed.err.startswith("python -m jax_fp8 report: a report is made of a run's folder")


BOTH = ["tune", "--preset", "tiny", "--rates", "rates.json"]


@pytest.mark.parametrize(
    "argv", [["trian"], ["doctor", "--resume"], ["tune"], ["tune", "--preset", "no"], BOTH, ["report"]]
)
def test_what_does_not_exist_is_one_sentence(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1


def test_the_package_is_a_command():
    finished = subprocess.run([sys.executable, "-m", "jax_fp8", "--help"], capture_output=True, text=True, check=True)
    assert all(command in finished.stdout for command in ("doctor", "tune", "plan", "report", "convert"))


NEEDS_COMPILER = pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))


@NEEDS_COMPILER
def test_plan_compiles_a_step_for_gpus_that_are_not_here(monkeypatch, capsys):
    if reason := extension.missing_reason():
        pytest.skip(reason)
    monkeypatch.setattr(gpt_plans, "load_cudnn", lambda: None)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    small = ["--preset", "tiny", "--mesh", "tensor=2", "--sequence-parallel", "--fast"]
    assert cli.main(["plan", *small]) == 0
    printed = capsys.readouterr().out
    assert (
        "tiny, 0.00B params, delayed, 8 x 128 tokens in 1 microbatches, 2 h200 (tensor=2, sequence parallel); compiling"
        in printed
    )
    assert "usable: fits" in printed and "TFLOP/s a GPU" in printed


REFUSED_PLANS = {
    "axes": (["--mesh", "context=2"], "a mesh must be axes among pipe, data, fsdp, expert, tensor"),
    "fewer microbatches than stages": (
        ["--mesh", "pipe=2", "--microbatches", "1"],
        "as many microbatches as stages, or more, got 1 micro",
    ),
    "chunks": (
        ["--mesh", "pipe=2", "--schedule", "interleaved", "--chunks", "3"],
        "have the same number of layers",
    ),
    "a schedule of no pipeline": (["--schedule", "1f1b"], "schedule and chunks are about the axis `pipe`"),
    "microbatches": (["--microbatches", "0"], "microbatches must be"),
    "batch": (["--batch", "-8"], "batch must be an integer of at least 1, got -8"),
    "sequence parallel": (["--sequence-parallel"], "splits rows over the axis `tensor`, which this mesh does not have"),
    "rows": (["--mesh", "data=2", "--batch", "3"], "every device must have as many rows"),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("case", REFUSED_PLANS)
def test_plans_that_are_refused(case, monkeypatch, capsys):
    arguments, message = REFUSED_PLANS[case]
    monkeypatch.setattr(extension, "missing_reason", lambda: None)
    monkeypatch.setattr(gpt_plans, "load_cudnn", lambda: None)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    assert cli.main(["plan", "--preset", "tiny", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.startswith("python -m jax_fp8 plan: ") and message in said and said.count("\n") == 1


def test_a_message_is_one_line_whatever_a_path_has(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path / "no\nwhere")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert cli.main(["convert", "--from", "huggingface", "n" * 5000, "--to", str(tmp_path / "file")]) == 1
    assert cli.main(["report", "n" * 5000]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_help_for_a_reader_that_goes(tmp_path):
    command = f"set -o pipefail; {sys.executable} -m jax_fp8 plan --help | head -1"
    finished = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "") and finished.stdout.startswith("usage: ")
