"""The benchmark of meshes, benchmarks/meshes.py, runs on CPU devices; its arithmetic, its table and its words for what
failed are right.

Times mean nothing here.
"""

import json

import numpy as np
import pytest

SMALL = {"preset": "tiny", "num_layers": 1, "seq_len": 32}


def measured(benchmark, profile=0, **case):
    mesh_steps, mesh_cases = benchmark("mesh_steps"), benchmark("mesh_cases")
    return list(mesh_steps.measure(mesh_steps.Job(mesh_cases.Case(**{**SMALL, **case}), steps=2, profile=profile)))


@pytest.mark.slow
def test_ours_and_plain_train_the_same_model(benchmark):
    (ours,) = measured(benchmark, mesh="data=2", fast=True, fp8_head=True, param_dtype="bfloat16")
    plain, with_profile = measured(benchmark, mesh="tensor=2+sequence", recipe="plain", profile=1)
    assert plain.items() <= with_profile.items()
    assert "kernels of a GPU stream" in with_profile["failed_beside"]  # the CPU has none
    for found, sequences in ((ours, 16), (plain, 8)):
        assert found["sequences"] == sequences
        assert found["samples_per_s"] == pytest.approx(1e3 * sequences / found["step_ms"])
        assert found["spread_ms"][0] <= found["step_ms"] <= found["spread_ms"][1]
        assert found["row_samples_per_s"] == pytest.approx(1e3 * sequences / found["row_ms"])
        assert abs(found["first_loss"] - np.log(256)) < 0.3
        assert found["first_loss"] != found["last_loss"]
    meshes = benchmark("meshes")
    meshes.check_same_model([ours, plain])
    with pytest.raises(ValueError, match="must have the same number of parameters"):
        meshes.check_same_model([ours, {**plain, "num_params": 10}])


def test_pieces_are_the_whole_step(benchmark):
    """Negative control: other microbatches have another loss."""
    mesh_cases = benchmark("mesh_cases")
    case = {"mesh": "fsdp=2", "recipe": "bf16", "microbatches": 2, "batch_per_data": 1, **SMALL}
    tokens = np.random.default_rng(0).integers(0, 256, (4, 33), np.int32)
    losses = {}
    for name, given, batch in (
        ("whole", {}, tokens),
        ("pieces", {"pieces": True, "cache_weights": False}, tokens),
        ("others", {"pieces": True, "cache_weights": False}, tokens[:, ::-1]),
    ):
        training = mesh_cases.build(mesh_cases.Case(**case, **given))
        _, metrics = training.step(training.make_state(), training.place(batch))
        losses[name] = float(metrics["loss"])
    assert losses["pieces"] == pytest.approx(losses["whole"], rel=1e-6)
    assert losses["others"] != pytest.approx(losses["whole"], rel=1e-6)
    pieces = mesh_cases.Case(mesh="fsdp=2", pieces=True, cache_weights=False)
    assert pieces.name == "delayed, pieces, weights not kept"


@pytest.mark.slow
def test_experts_are_split(benchmark):
    """Their axis splits the batch, too."""
    (found,) = measured(benchmark, mesh="expert=2", preset="tiny-moe", batch_per_data=2)
    assert found["sequences"] == 4 and abs(found["first_loss"] - np.log(256)) < 0.3


def test_experts_that_are_not_there(benchmark):
    mesh_cases = benchmark("mesh_cases")
    with pytest.raises(ValueError, match="the axis expert needs a preset with experts, got tiny; choose another"):
        mesh_cases.Case(mesh="expert=2", preset="tiny")
    with pytest.raises(ValueError, match="plain has no experts, got tiny-moe; choose another recipe or preset"):
        mesh_cases.Case(mesh="data=2", preset="tiny-moe", recipe="plain")


def test_pieces_are_of_jax_fp8_and_have_no_profile(benchmark, capsys):
    meshes = benchmark("meshes")
    assert meshes.main(["--mesh", "data=2", "--recipe", "plain", "--pieces"]) == 2
    assert "pieces must be those of a step of jax_fp8, got plain Flax" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        meshes.main(["--mesh", "data=2", "--pieces", "--profile", "1"])
    assert "--profile and --report are of a step as a whole" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("axes", "path", "shape", "spec"),
    [
        ({"data": 4}, ("block_0", "qkv", "kernel"), (64, 192), (None, None)),
        ({"fsdp": 4}, ("block_0", "qkv", "kernel"), (64, 192), (None, "fsdp")),
        ({"fsdp": 4}, ("block_0", "mlp_out", "kernel"), (256, 64), ("fsdp", None)),
        ({"fsdp": 4}, ("final_norm", "scale"), (62,), (None,)),
        ({"fsdp": 4}, ("count",), (), ()),
        ({"tensor": 4}, ("block_0", "qkv", "kernel"), (64, 192), (None, "tensor")),
        ({"tensor": 4}, ("block_0", "mlp_in", "bias"), (256,), ("tensor",)),
        ({"tensor": 4}, ("block_0", "attention_out", "kernel"), (64, 64), ("tensor", None)),
        ({"tensor": 4}, ("block_0", "attention_out", "bias"), (64,), (None,)),
        ({"tensor": 4}, ("embedding",), (256, 64), ("tensor", None)),
        ({"fsdp": 2, "tensor": 2}, ("mu", "block_0", "mlp_out", "kernel"), (256, 64), ("tensor", "fsdp")),
    ],
)
def test_where_plain_params_lie(benchmark, axes, path, shape, spec):
    assert tuple(benchmark("mesh_plain").spec_of(path, shape, axes)) == spec


def test_a_plain_state_is_made_in_parts(benchmark):
    import jax

    mesh_cases = benchmark("mesh_cases")
    for mesh, part in (("fsdp=2", (128, 128)), ("data=2", (256, 128))):
        training = mesh_cases.build(mesh_cases.Case(**SMALL, mesh=mesh, recipe="plain"))
        (variables, opt_state) = training.make_state()
        moments = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.shape == (256, 128)]
        for leaf in (variables["params"]["embedding"], *moments):
            assert leaf.addressable_shards[0].data.shape == part
        assert len(moments) == 2


@pytest.mark.parametrize(
    ("mesh", "given", "sequences"),
    [
        ("data=4", {}, 32),
        ("fsdp=4", {"batch_per_data": 2, "microbatches": 3}, 24),
        ("tensor=2", {}, 8),
        ("tensor=4+sequence", {}, 16),
        ("data=2,tensor=4", {}, 32),
        ("data=2", {"batch": 6}, 6),
        ("data=2", {"batch": 6, "microbatches": 3}, 6),
        ("pipe=4", {}, 32),
        ("pipe=4", {"microbatches": 8}, 32),
        ("data=2,pipe=2,tensor=4", {}, 64),
        ("pipe=2", {"batch": 16, "microbatches": 16}, 16),
    ],
)
def test_sequences_of_a_step(benchmark, mesh, given, sequences):
    assert benchmark("mesh_cases").Case(mesh=mesh, **given).sequences == sequences


@pytest.mark.parametrize("mesh", ["", "context=2", "data", "data=x", "data=0", "data=2,tensor"])
def test_what_is_no_mesh_is_one_sentence(benchmark, mesh, capsys):
    with pytest.raises(ValueError, match="a mesh must be axes among pipe, data, fsdp, expert, tensor, each once"):
        benchmark("mesh_cases").parse_axes(mesh)


def test_sequence_parallel_needs_tensor(benchmark, capsys):
    assert benchmark("meshes").main(["--mesh", "data=2", "--sequence-parallel"]) == 2
    assert "+sequence needs the axis tensor, got data=2+sequence" in capsys.readouterr().err


def test_all_is_every_mesh_with_three_recipes(benchmark):
    meshes = benchmark("meshes")
    jobs = meshes.jobs_of(meshes.parse(["--all", "--devices", "4", "--graphs", "none", "--gradient-dtype", "bfloat16"]))
    assert [job.case.mesh for job in jobs[::3]] == ["data=4", "fsdp=4", "tensor=4", "tensor=4+sequence", "pipe=4"]
    assert [job.case.name for job in jobs[:3]] == [
        "delayed, fast, FP8 head, bfloat16 params, bfloat16 gradients",
        "bf16, bfloat16 gradients",
        "plain",
    ]
    assert [job.case.recipe for job in jobs[12:]] == ["delayed", "bf16"]  # plain Flax has no pipeline
    assert {job.case.graphs for job in jobs} == {"none"}
    assert all(type(job).from_json(job.to_json()) == job for job in jobs)


@pytest.mark.parametrize("recipe", ["bf16", "plain"])
def test_graphs_are_options_of_the_compiler(benchmark, recipe):
    mesh_cases = benchmark("mesh_cases")
    options = {
        graphs: mesh_cases.Case(mesh="data=2", recipe=recipe, graphs=graphs, options={"xla_x": "1"}).compiler_options
        for graphs in mesh_cases.GRAPHS
    }
    assert options["default"] == {"xla_x": "1"}
    assert options["none"]["xla_gpu_enable_command_buffer"] == ""
    assert options["collectives"]["xla_gpu_enable_command_buffer"].split(",")[-1] == "COLLECTIVES"


def test_options_of_xla(benchmark):
    read_options = benchmark("meshes").read_options
    assert read_options(["xla_a=true", "xla_b=False", "xla_c=x=1"]) == {"xla_a": True, "xla_b": False, "xla_c": "x=1"}
    with pytest.raises(ValueError, match="--option needs NAME=VALUE, got xla_a; say xla_name=true"):
        read_options(["xla_a"])


# --- processes that fail ----------------------------------------------------------------------------------------------


def test_cases_beyond_the_total_are_not_begun(benchmark, tmp_path, capsys):
    output = tmp_path / "results.json"
    arguments = ["--mesh", "data=2", "fsdp=2", "--total", "5", "--output", str(output)]
    assert benchmark("meshes").main(arguments) == 1
    assert [found["failed"] for found in json.loads(output.read_text())] == 2 * ["not begun within 5 s"]
    assert capsys.readouterr().out.count("| failed: not begun within 5 s |") == 2


def test_the_table_has_what_was_measured(benchmark):
    meshes, mesh_cases = benchmark("meshes"), benchmark("mesh_cases")
    case = mesh_cases.dataclasses.asdict(mesh_cases.Case(mesh="tensor=4", recipe="bf16"))
    times = {"samples_per_s": 128.0, "step_ms": 125.0, "row_samples_per_s": 160.0, "row_ms": 100.0, "first_step_s": 9.0}
    times |= {"bubble": 1 / 8}
    found = {
        "case": case,
        **times,
        "peak_gib": [22.25, 23.5],
        "first_loss": 11.0,
        "last_loss": 10.5,
        "wire_mib": 1056.0,
    }
    lines = meshes.markdown([found, {"case": case, "failed": "exit status 1"}]).splitlines()
    assert lines[2].startswith(
        "| tensor=4 | bf16 | default | 16 | 128.0 | 125.0 | 160.0 | 100.0 | 12.5% | 23.5 | 11.0000 |"
    )
    assert "| 1,056.0 | 9 |" in lines[2]
    assert lines[3].endswith("| failed: exit status 1 |")


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_a_union_does_not_overlap(benchmark):
    overlap = benchmark("overlap")
    assert overlap.union([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert overlap.length([(0, 4), (5, 6)]) == 5
    assert overlap.union([]) == []


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ([(0, 4)], [(1, 2), (3, 6)], 2),
        ([(0, 1), (2, 3), (8, 9)], [(0, 9)], 3),
        ([(0, 1)], [(1, 2)], 0),
        ([], [(0, 1)], 0),
    ],
)
def test_what_two_sets_of_intervals_share(benchmark, first, second, both):
    overlap = benchmark("overlap")
    assert overlap.shared(first, second) == overlap.shared(second, first) == both


def a_trace(*devices):
    """Events of kernels, (name, stream, start, end) in milliseconds, one list for each GPU."""
    events = []
    for pid, kernels in enumerate(devices):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"/device:GPU:{pid}"}})
        for name, tid, start, end in kernels:
            stream = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": f"Stream #{tid}"}}
            event = {"ph": "X", "pid": pid, "tid": tid, "ts": 1e3 * start, "dur": 1e3 * (end - start), "name": name}
            events += [stream, event]
    return events


def test_time_that_collectives_cost(benchmark):
    """On the first device half of the reduction lies under a GEMM; the second waits for the first, exposed."""
    overlap = benchmark("overlap")
    first = [("nvjet_tst_1", 1, 0, 4), ("ncclDevKernel_AllReduce", 2, 2, 6), ("nvjet_tst_2", 1, 8, 10)]
    second = [("nvjet_tst_1", 1, 0, 1), ("ncclDevKernel_AllReduce", 2, 1, 6), ("nvjet_tst_2", 1, 6, 10)]
    found = overlap.summarize(a_trace(first, second), steps=2, hlo_text="")
    names = ("span", "compute", "collectives", "hidden", "exposed", "gaps")
    assert [found["/device:GPU:0"][name] for name in names] == [5, 3, 2, 1, 1, 1]
    assert [found["/device:GPU:1"][name] for name in names] == [5, 2.5, 2.5, 0, 2.5, 0]
    assert found["/device:GPU:0"]["ms"]["collectives"] == 2
    assert found["/device:GPU:1"]["ms"]["bf16 GEMM"] == 2.5
    page = overlap.markdown(found)
    assert "| exposed | 1 | 2.5 |" in page
    assert "| ms a step | GPU:0 | GPU:1 |" in page


# --- losses on text ---------------------------------------------------------------------------------------------------


def test_losses_on_text_are_drawn(benchmark, book, tmp_path):
    meshes, mesh_curves, mesh_steps = benchmark("meshes"), benchmark("mesh_curves"), benchmark("mesh_steps")
    batches, losses, picture = tmp_path / "batches.npy", tmp_path / "losses.json", tmp_path / "curves.png"
    sizes = ["--steps", "3", "--batch-size", "4", "--seq-len", "32", "--vocab-size", "300"]
    text = [str(batches), "--data", str(book), "--cache", str(tmp_path), *sizes]
    assert mesh_curves.main(["text", *text]) == 0
    found = np.load(batches)
    assert (found.shape, found.dtype) == ((3, 4, 33), np.uint16)
    reading = mesh_curves.Reading(vocab_size=300, seq_len=32, batch_size=4, steps=3, validation_tokens=128)
    prepared = mesh_curves.prepare(reading, book, tmp_path)
    np.testing.assert_array_equal(found[2], prepared.batch(2, 32))

    def results(vocabulary):
        arguments = ["--mesh", "data=2", "--recipe", "plain", "--preset", "tiny", "--num-layers", "1"]
        options = meshes.parse([*arguments, "--vocab-size", vocabulary, "--text", str(batches)])
        return [next(mesh_steps.measure(job)) for job in meshes.jobs_of(options)]

    with pytest.raises(ValueError, match=r"tokens must be below the vocabulary of 256, got 2\d\d; set --vocab-size"):
        results("0")
    losses.write_text(json.dumps(results("512")))
    (curve,) = mesh_curves.read_losses([losses]).values()
    assert len(curve) == 3
    assert curve[-1] < curve[0]
    assert mesh_curves.main(["draw", str(losses), "--output", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_a_picture_needs_losses(benchmark, tmp_path, capsys):
    (tmp_path / "times.json").write_text(json.dumps([{"case": {"mesh": "data=2"}, "failed": "exit status 1"}]))
    mesh_curves = benchmark("mesh_curves")
    assert mesh_curves.main(["draw", str(tmp_path / "times.json"), "--output", str(tmp_path / "curves.png")]) == 2
    assert "a picture needs losses, got none in" in capsys.readouterr().err
    assert not (tmp_path / "curves.png").exists()
