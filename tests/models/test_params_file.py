"""Params as a safetensors file: what comes back, where it lies, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

pytestmark = pytest.mark.versions
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.numpy")


def make_params(dtype=jnp.float32):
    kernel = jax.random.normal(jax.random.key(0), (8, 16)).astype(dtype)
    return {"layer_0": {"up": {"kernel": kernel, "bias": jnp.arange(16.0)}}, "scale": jnp.float32(3)}


def check_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, fp8.E4M3, fp8.E5M2])
def test_params_come_back_bit_for_bit(dtype, tmp_path):
    params, path = make_params(dtype), tmp_path / "params.safetensors"
    fp8.save_params(path, params)
    check_equal(fp8.load_params(path), params)
    check_equal(fp8.load_params(path, params), params)
    check_equal(fp8.load_params(path, jax.eval_shape(lambda: params)), params)


def test_a_file_is_what_other_programs_read(tmp_path):
    params = jax.tree.map(np.asarray, make_params())
    fp8.save_params(tmp_path / "ours", params)
    with safetensors.safe_open(tmp_path / "ours", framework="np") as file:
        assert sorted(file.keys()) == ["layer_0.up.bias", "layer_0.up.kernel", "scale"]
        np.testing.assert_array_equal(file.get_tensor("layer_0.up.kernel"), params["layer_0"]["up"]["kernel"])
    transposed = {"a.kernel": np.asfortranarray(params["layer_0"]["up"]["kernel"])}
    fp8.save_params(tmp_path / "order", {"a": {"kernel": transposed["a.kernel"]}})
    check_equal(fp8.load_params(tmp_path / "order")["a"]["kernel"], params["layer_0"]["up"]["kernel"])


def test_params_in_fp8_keep_their_scale(tmp_path):
    params = {"kernel": fp8.quantize(jnp.ones((4, 4)), fp8.E4M3, jnp.float32(2))}
    fp8.save_params(tmp_path / "file", params)
    found = fp8.load_params(tmp_path / "file", params)
    assert isinstance(found["kernel"], fp8.Fp8Array)
    check_equal(found, params)


def test_params_of_a_mesh_are_gathered_and_put_back(tmp_path):
    params, mesh = make_params(), jax.make_mesh((8,), ("a",))
    split = NamedSharding(mesh, P("a"))
    params["layer_0"]["up"]["kernel"] = jax.device_put(params["layer_0"]["up"]["kernel"], split)
    fp8.save_params(tmp_path / "file", params)
    found = fp8.load_params(tmp_path / "file", params)
    check_equal(found, params)
    assert found["layer_0"]["up"]["kernel"].sharding == split
    assert len(fp8.load_params(tmp_path / "file")["layer_0"]["up"]["kernel"].sharding.device_set) == 1


def test_a_model_trains_on_from_a_file(tmp_path):
    """Of a real model, whose names have to lead back to where they came from."""
    model = fp8.GPT(
        fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=32, num_heads=2, max_seq_len=16), recipe=None
    )
    tokens = jnp.zeros((1, 16), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    fp8.save_params(tmp_path / "file", params)
    check_equal(
        fp8.load_params(tmp_path / "file", jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]), params
    )


def changed(**changes):
    return {"layer_0": {"up": {"kernel": jnp.zeros((8, 16)), "bias": jnp.zeros(16)} | changes}, "scale": jnp.float32(3)}


@pytest.mark.parametrize(
    ("like", "sentence"),
    [
        (
            changed(kernel=jnp.zeros((16, 8))),
            r"layer_0\.up\.kernel in .* must be float32\[16, 8\] as in the model, got f",
        ),
        (
            changed(bias=jnp.zeros(16, jnp.bfloat16)),
            r"layer_0\.up\.bias in .* must be bfloat16\[16\] .* got float32\[16",
        ),
        (changed(other=jnp.zeros(1)), r"layer_0\.up\.other is in the model and not in the file"),
        ({"scale": jnp.float32(3)}, r"layer_0\.up\.bias is in the file and not in the model"),
    ],
)
def test_params_of_another_model_are_refused(like, sentence, tmp_path):
    fp8.save_params(tmp_path / "file", make_params())
    fp8.load_params(tmp_path / "file", changed())
    with pytest.raises(ValueError, match=sentence):
        fp8.load_params(tmp_path / "file", like)


def test_what_is_no_file_and_what_is_cut_short(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(ValueError, match=r"there is none at .*file; save one by save_params"):
        fp8.load_params(path)
    fp8.save_params(path, make_params())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"must be a whole safetensors file, got .*; copy it again"):
        fp8.load_params(path)
    with pytest.raises(ValueError, match=r"params must find room in .*nowhere.*, got .*; choose another folder"):
        fp8.save_params(tmp_path / "nowhere/file", make_params())


def test_a_dtype_that_jax_does_not_have(tmp_path):
    arrays = {"a": np.ones(2), "b": np.ones((0, 3), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "file")
    with pytest.raises(ValueError, match=r"must have dtypes of F32, .* got F64 for a; convert it first"):
        fp8.load_params(tmp_path / "file")
    safetensors.numpy.save_file({"b": arrays["b"]}, tmp_path / "file")
    assert fp8.load_params(tmp_path / "file")["b"].shape == (0, 3)


@pytest.mark.parametrize("params", [{"a.b": jnp.ones(1)}, [jnp.ones(1)], jnp.ones(1)], ids=["dot", "list", "array"])
def test_names_that_would_not_come_back(params, tmp_path):
    with pytest.raises(ValueError, match=r'params must be nested dicts, with names that have no "\."'):
        fp8.save_params(tmp_path / "file", params)
    assert not (tmp_path / "file").exists()


def test_a_file_has_the_shape_of_its_model(tmp_path):
    config = fp8.GPTConfig.preset("llama3.2-1b", num_layers=1)
    fp8.save_params(tmp_path / "file", make_params(), config)
    assert fp8.load_config(tmp_path / "file") == config
    check_equal(fp8.load_params(tmp_path / "file"), make_params())
    fp8.save_params(tmp_path / "alone", make_params())
    with pytest.raises(ValueError, match=r"alone must have the shape of its model, but has params alone; save them by"):
        fp8.load_config(tmp_path / "alone")
    with pytest.raises(ValueError, match="params must be read from a file, but there is none at"):
        fp8.load_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config must be a GPTConfig or None, got a str; pass that of the model"):
        fp8.save_params(tmp_path / "file", make_params(), "llama3.2-1b")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a", "a.b"], "must have names that are paths to one array each, got a and a.b; rename one"),
        (["a.b", "a.b.c.d"], r"got a\.b and a\.b\.c\.d; rename one"),
        ([".".join("a" * 100)], "must have names of at most 64 parts, got 'a.a.a"),
    ],
)
def test_names_that_are_no_tree(names, sentence, tmp_path):
    safetensors.numpy.save_file({name: np.ones(2, np.float32) for name in ["ab", *names]}, tmp_path / "file")
    with pytest.raises(ValueError, match=sentence):
        fp8.load_params(tmp_path / "file")


def test_random_keys_are_no_params(tmp_path):
    with pytest.raises(ValueError, match=r"must be plain arrays, got key<.*>\[\] for key; take jax.random.key_data"):
        fp8.save_params(tmp_path / "file", {"key": jax.random.key(0)})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "file must describe its model in JSON, got a list in place of a JSON object; save it again"),
        ("{", r"file must describe its model in JSON, got no JSON"),
        ('{"num_layers": 1000000000}', "num_layers in .*file must be at most 4,096, got 1000000000"),
        ("{}", "file must describe a model: "),
    ],
)
def test_the_shape_of_a_strangers_model(text, sentence, tmp_path):
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, tmp_path / "file", {"jax_fp8.GPTConfig": text})
    with pytest.raises(ValueError, match=sentence) as raised:
        fp8.load_config(tmp_path / "file")
    assert "\n" not in str(raised.value)
