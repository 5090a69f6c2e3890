"""Checkpoints of a run: what is in one, that it comes back bit for bit, and what is said where it cannot."""

import dataclasses
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.run import checkpoints

TX = fp8.fused_adamw(1e-3)
NOTES = {"rows": {"delayed": 3}, "losses": [1.0, 0.1]}


def make_state(seed=0, dtype=jnp.float32, tx=TX, history=4) -> fp8.TrainState:
    """A state like those of a layer in FP8, but of other numbers in every array; without history, one in bfloat16."""
    generator = np.random.default_rng(seed)

    def draw(like):
        return jnp.asarray(generator.integers(0, 2**15, like.shape)).astype(like.dtype)

    params = {"kernel": jnp.zeros((32, 64), dtype), "bias": jnp.zeros((64,), dtype)}
    fp8_state = {"amax_history": jnp.zeros((3, history)), "scale": jnp.zeros((3,))} if history else {}
    state = fp8.TrainState(jnp.int32(seed), params, fp8_state, tx.init(params))
    return jax.tree.map(draw, state)


def shapes_of(state):
    return jax.eval_shape(lambda: state)


def no_scales():
    raise AssertionError("the FP8 state was saved")


def check_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def first_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    with checkpoints.Checkpoints(folder, every=2, keep=2, resume=False) as kept:
        for step in (2, 4):
            kept.save(step, make_state(step), NOTES)
    return folder


@pytest.fixture
def saved(first_saved, tmp_path):
    """A folder with checkpoints of steps 2 and 4, of states of seeds 2 and 4."""
    return Path(shutil.copytree(first_saved, tmp_path / "mine/checkpoints"))


def restore(folder, like=None):
    with checkpoints.Checkpoints(folder, every=2, keep=2, resume=True) as kept:
        return kept.restore(shapes_of(make_state()) if like is None else like, no_scales)[0]


@pytest.mark.versions
def test_a_state_comes_back_bit_for_bit_without_its_weight_cache(tmp_path):
    cache = {"kernel": fp8.quantize(jnp.ones((32, 64)), fp8.E4M3, jnp.ones(()))}
    state, folder = dataclasses.replace(make_state(), cache=cache), tmp_path / "checkpoints"
    expected = jax.tree.map(np.array, make_state())
    with checkpoints.Checkpoints(folder, every=3, keep=2, resume=False) as kept:
        kept.save(3, state, NOTES)
        jax.jit(lambda state: jax.tree.map(jnp.zeros_like, state), donate_argnums=0)(state)  # as the next step does
    assert sorted(path.name for path in (folder / "3").iterdir() if path.is_dir()) == [
        "fp8",
        "notes",
        "opt_state",
        "params",
    ]
    with checkpoints.Checkpoints(folder, every=3, keep=2, resume=True) as kept:
        assert {name: kept.last[name] for name in NOTES} == NOTES
        found, is_new = kept.restore(shapes_of(make_state()), no_scales)
    assert (int(found.step), is_new) == (3, False)
    check_equal((found.params, found.opt_state, found.fp8), (expected.params, expected.opt_state, expected.fp8))
    with checkpoints.Checkpoints(folder, every=0, keep=2, resume=True) as kept:
        check_equal(kept.restore_variables({"params": shapes_of(make_state()).params})["params"], expected.params)
    other = make_state(1)  # negative control
    assert not np.array_equal(found.params["kernel"], other.params["kernel"])


def test_which_steps_are_due_and_which_stay(saved):
    kept = checkpoints.Checkpoints(saved, every=2, keep=2, resume=True)
    assert [step for step in range(1, 8) if kept.is_due(step, 7)] == [2, 4, 6, 7]
    none = checkpoints.Checkpoints(saved, every=0, keep=2, resume=False)
    assert not any(none.is_due(step, 7) for step in range(1, 8))
    none.save(9, make_state(), NOTES)
    with kept:
        kept.save(4, make_state(5), NOTES)  # it is there already, and stays
        kept.save(6, make_state(6), NOTES)
    assert checkpoints.steps_in(saved) == [4, 6]
    check_equal(restore(saved).params, make_state(6).params)


def test_a_state_moves_between_meshes(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"))

    def place(leaf):
        return NamedSharding(mesh, P("a", "b") if leaf.ndim == 2 and leaf.shape[0] % 4 == 0 else P())

    state = make_state()
    spread = jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf)), state)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place(leaf)), state)
    for name, given in {"one": state, "many": spread}.items():
        with checkpoints.Checkpoints(tmp_path / name, every=1, keep=1, resume=False) as kept:
            kept.save(1, given, NOTES)
    one, many = (restore(tmp_path / name, wanted) for name, wanted in {"many": None, "one": like}.items())
    check_equal((one.params, one.opt_state), (state.params, state.opt_state))
    check_equal((many.params, many.opt_state), (state.params, state.opt_state))
    assert many.params["kernel"].sharding == place(state.params["kernel"])
    assert one.params["kernel"].sharding.device_set == {jax.devices()[0]}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16, jnp.int32, fp8.E4M3])
def test_a_sum_of_bits_tells_arrays_apart(dtype):
    array = np.asarray(jnp.arange(1, 65).reshape(8, 8).astype(dtype))
    mesh = jax.make_mesh((4,), ("a",))

    def total(array, spec=None):
        array = jnp.asarray(array)
        return checkpoints.describe([array if spec is None else jax.device_put(array, NamedSharding(mesh, spec))])[
            "[0]"
        ]

    expected = total(array)
    assert expected[:2] == [str(jnp.dtype(dtype)), [8, 8]] and len(expected) == 3
    assert total(array, P("a")) == total(array, P(None, "a")) == expected
    for number in (0, 17, 63):  # any bit of any element
        for bit in range(8):
            flipped = array.copy()
            flipped.view(np.uint8).reshape(64, -1)[number, 0] ^= 1 << bit
            assert total(flipped) != expected
    assert total(array.T) != expected
    assert checkpoints.describe([jax.ShapeDtypeStruct((8, 8), dtype)])["[0]"] == expected[:2]


# --- what does not fit ------------------------------------------------------------------------------------------------

REMAINDER = fp8.fused_adamw(1e-3, master_dtype="remainder")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": jnp.bfloat16}, "params['bias'] must be bfloat16[64] in this run, got float32[64] in the checkpoint"),
        ({"tx": fp8.fused_adamw(1e-3, mu_dtype=jnp.bfloat16)}, ".mu['bias'] must be bfloat16[64] in this run"),
    ],
)
def test_arrays_of_another_dtype_are_refused(changes, sentence, saved):
    with pytest.raises(checkpoints.CannotResume) as raised:
        restore(saved, shapes_of(make_state(**changes)))
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("then", "now"),
    [pytest.param(TX, REMAINDER, id="to remainder"), pytest.param(REMAINDER, TX, id="from", marks=pytest.mark.slow)],
)
def test_masters_of_another_dtype_are_refused(then, now, tmp_path):
    with checkpoints.Checkpoints(tmp_path / "checkpoints", every=1, keep=1, resume=False) as kept:
        kept.save(1, make_state(dtype=jnp.bfloat16, tx=then), NOTES)
    with pytest.raises(checkpoints.CannotResume, match=r"\.master\['bias'\] must be .* in this run, got .* in the"):
        restore(tmp_path / "checkpoints", shapes_of(make_state(dtype=jnp.bfloat16, tx=now)))
    restore(tmp_path / "checkpoints", shapes_of(make_state(dtype=jnp.bfloat16, tx=then)))


def test_another_recipe_brings_new_scales(saved, tmp_path):
    state, without, longer = make_state(4), make_state(4, history=0), make_state(5, history=8)
    with checkpoints.Checkpoints(saved, every=2, keep=2, resume=True) as kept:
        found, is_new = kept.restore(shapes_of(without), no_scales)
        assert (found.fp8, is_new) == ({}, False)
        check_equal((found.params, found.opt_state), (state.params, state.opt_state))
        found, is_new = kept.restore(shapes_of(longer), lambda: longer.fp8)
        assert is_new
        check_equal((found.params, found.fp8), (state.params, longer.fp8))
    with checkpoints.Checkpoints(tmp_path / "bf16", every=1, keep=1, resume=False) as kept:
        kept.save(1, without, NOTES)
        found, is_new = kept.restore(shapes_of(longer), lambda: longer.fp8)
    assert is_new
    check_equal((found.params, found.fp8), (without.params, longer.fp8))


# --- what is damaged --------------------------------------------------------------------------------------------------


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "a bit": lambda step: flip(largest(step / "params")),
    "a bit of the moments": lambda step: flip(largest(step / "opt_state")),
    "half an array": lambda step: cut(largest(step / "params")),
    "no array": lambda step: largest(step / "params").unlink(),
    "no params": lambda step: shutil.rmtree(step / "params"),
    "half of the tree": lambda step: cut(step / "params/_METADATA"),
    "half of the notes": lambda step: cut(step / "notes/metadata"),
    "no notes": lambda step: shutil.rmtree(step / "notes"),
    "an empty folder": lambda step: (shutil.rmtree(step), step.mkdir()),
}


FAST = ("a bit", "half an array", "half of the notes", "an empty folder")


# Orbax reads arrays in threads: another may report to its event loop after the first that failed has closed it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.versions
@pytest.mark.parametrize(
    "damage", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE]
)
def test_what_is_damaged_is_one_sentence_and_the_one_before_is_whole(damage, saved, capfd):
    DAMAGE[damage](saved / "4")
    with pytest.raises(checkpoints.CannotResume) as raised:
        restore(saved)
    sentence = str(raised.value)
    assert f"the checkpoint {saved / '4'} must be as it was saved, got " in sentence and "\n" not in sentence
    assert sentence.endswith("remove it, and --resume continues from step 2") and len(sentence) < 300
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(saved / "4")
    check_equal(restore(saved).params, make_state(2).params)


# --- what cannot be written -------------------------------------------------------------------------------------------


@pytest.fixture
def small_files():
    """Files may grow to 1 KiB in this process, which is what a full disk looks like to it."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_cannot_save(folder, expected):
    with pytest.raises(checkpoints.CannotSave) as raised:
        with checkpoints.Checkpoints(folder, every=2, keep=2, resume=False) as kept:
            kept.save(6, make_state(6), NOTES)
    sentence = str(raised.value)
    assert expected in sentence and "\n" not in sentence and len(sentence) < 300
    return sentence


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(saved, small_files, capfd):
    sentence = check_cannot_save(saved, "got File too large; the checkpoint of step 4 is complete")
    assert "--resume continues from it" in sentence
    assert sorted(path.name for path in saved.iterdir()) == ["2", "4"]
    check_equal(restore(saved).params, make_state(4).params)
    assert capfd.readouterr() == ("", "")


def test_what_will_not_fit_is_found_before_training(saved, monkeypatch):
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(make_state()))
    kept = checkpoints.Checkpoints(saved, every=2, keep=4, resume=True)
    free = 3 * size  # two of five are there
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
    kept.check_room(make_state())
    free -= 100
    with pytest.raises(checkpoints.CannotSave, match=r"--keep 4 needs room for 0\.1 MiB of checkpoints, got 0\.1 MiB"):
        kept.check_room(make_state())
    checkpoints.Checkpoints(saved, every=0, keep=4, resume=True).check_room(make_state())


def test_a_folder_that_vanished_is_not_made_again(saved):
    with pytest.raises(checkpoints.CannotSave, match=rf"got no folder {saved.parent}; choose another --output"):
        with checkpoints.Checkpoints(saved, every=2, keep=2, resume=True) as kept:
            kept.save(6, make_state(6), NOTES)
            kept.finish()
            shutil.rmtree(saved.parent)
            kept.save(8, make_state(8), NOTES)
    assert not saved.parent.exists()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    check_cannot_save(tmp_path / "checkpoints", f"written to {tmp_path / 'checkpoints'}, got Not a directory; ")
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_folder_without_permission(saved, monkeypatch):
    """Root may write everywhere, and is told here that it may not."""
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (saved, os.W_OK))
    saved.chmod(0o500)
    check_cannot_save(saved, "got Permission denied; the checkpoint of step 4 is complete")
    assert sorted(path.name for path in saved.iterdir()) == ["2", "4"]
    saved.chmod(0o700)
    check_equal(restore(saved).params, make_state(4).params)
