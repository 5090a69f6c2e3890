"""The reference: every public name, and every method that the site shows, documents itself, and what it says is true.

A docstring names each argument and no other, what a call returns, and the errors that a caller can cause. Its example
runs. Each rule is a function from an object to the sentences that say what is missing; each is also tried on docstrings
that lack it. An error that a docstring names is caused here, by a call of `caused_errors.py`.
"""

import dataclasses
import doctest
import importlib
import inspect
import pathlib
import re
from typing import NamedTuple

import caused_errors
import flax.linen as nn
import pytest
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx

ROOT = pathlib.Path(__file__).parents[1]
CONSTANTS = ROOT / "jax_fp8/core/formats.py"
INTEGRATIONS = {path.stem for path in (ROOT / "jax_fp8/integrations").glob("*.py")}
SECTIONS = ("Args", "Returns", "Raises", "Example")
LONGEST_SENTENCE = 30  # words, of a summary

LINEN = "its fields are checked in a call"
PLAIN = "a dataclass that checks nothing"
# Name: why no call of it raises.
RAISES_NOTHING: dict[str, str] = {
    **dict.fromkeys(("E4M3", "E5M2", "HYBRID"), "a constant"),
    **dict.fromkeys(("GPT", "Dense", "LayerNormDense", "LayerNormMLP", "LayerNormMoE", "SelfAttention"), LINEN),
    **dict.fromkeys(("CrossAttention", "TransformerBlock", "DotGeneral", "Fp8Module"), LINEN),
    "GPTConfig.layer_fields": "any number is of some layer",
    **dict.fromkeys(("Fp8Array", "WholeBatchLoss", "InPlace", "TrainState", "Diagnostics", "GemmTable"), PLAIN),
    "nnx.Conversion": PLAIN,
    "nnx.Fp8State": "a variable of Flax",
    "nnx.batch_stats": "reads what is there",
    "TrainStep": "make_train_step makes it",
    "tunix.warm_start": "runs the loss of a trainer",
    "listing.Listing": PLAIN,
    "maxtext.listing": "reads what is there",
    **dict.fromkeys(("equinox.split", "equinox.by_maximum"), "takes any tree"),
    **dict.fromkeys(("Diagnostics.from_step", "Diagnostics.rows"), "reads what a step has made"),
    **dict.fromkeys(("GemmTable.restricted_to", "GemmTable.candidate", "GemmTable.rows"), "reads what is there"),
}
# Name: why it has no arguments of its own.
OTHER_CONSTRUCTORS: dict[str, str] = {
    "nnx.Fp8State": "the constructor of nnx.Variable",
    "TrainStep": "make_train_step makes it",
}
# Name: why it has no example.
WITHOUT_EXAMPLE: dict[str, str] = {
    "Fp8Module": "the base of the layers, each of which has one",
    "TrainStep": "the example of make_train_step",
}
# Name: why a line of its example is skipped.
NEEDS_GPU: dict[str, str] = {
    "capture_report": "reads what the compiler says of a program for a GPU",
    "tune": "measures on the GPU",
}


class Documented(NamedTuple):
    """An object of the reference: its name, itself and its docstring."""

    name: str
    item: object
    doc: str

    @property
    def sections(self) -> dict[str, list[str]]:
        """The lines of each section, without indentation of their own."""
        found: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in self.doc.splitlines():
            if line.rstrip(":") in SECTIONS and line.endswith(":"):
                lines = found.setdefault(line.rstrip(":"), [])
            else:
                lines.append(line.removeprefix("  "))
        return found

    @property
    def parameters(self) -> list[str]:
        """The arguments as `Args` names them: those of a function, or the fields of a dataclass."""
        if isinstance(self.item, type) and issubclass(self.item, nn.Module):
            names = [field.name for field in dataclasses.fields(self.item)]
            return [name for name in names if name not in ("parent", "name")]
        if isinstance(self.item, type) and issubclass(self.item, nnx.Module):
            return _named(self.item.__init__)[1:]
        if self.name in OTHER_CONSTRUCTORS or not callable(self.item) or self.doc in _comments().values():
            return []
        is_method = "." in without_module(self.name) and not inspect.ismethod(self.item)
        return _named(self.item)[is_method:]


def has_own_names(module: str) -> bool:
    """Whether the names of a module are its own, so that they stand with its name in front."""
    return module == "jax_fp8.nnx" or module.startswith("jax_fp8.integrations.")


def without_module(name: str) -> str:
    """A name of the reference as it is in its module."""
    module, _, attribute = name.partition(".")
    return attribute if module == "nnx" or module in INTEGRATIONS else name


def _named(function) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [stars.get(given.kind, "") + given.name for given in inspect.signature(function).parameters.values()]


def _comments() -> dict[str, str]:
    """The `#:` comment of each constant."""
    found = re.findall(r"((?:^#:.*\n)+)^(\w+) = ", CONSTANTS.read_text(), re.MULTILINE)
    return {name: re.sub(r"^#: ?", "", comment, flags=re.MULTILINE) for comment, name in found}


def documented(name: str, item: object) -> Documented:
    """An object with its docstring, or a constant with its comment."""
    return Documented(name, item, _comments().get(name) or inspect.getdoc(item) or "")


def reference() -> dict[str, Documented]:
    """All that the pages of the reference show, by name: functions, classes and constants, and methods of classes. A
    name is without its module, but for `nnx` and those of integrations."""
    found = []
    for page in sorted((ROOT / "docs/reference").glob("*.rst")):
        for kind, name, options in re.findall(r"^\.\. auto(\w+):: (\S+)\n((?:   .+\n)*)", page.read_text(), re.M):
            module, _, attribute = (name if "." in name else f"jax_fp8.{name}").rpartition(".")
            item = getattr(importlib.import_module(module), attribute)
            name = f"{module.rsplit('.', 1)[1]}.{attribute}" if has_own_names(module) else attribute
            found.append(documented(name, item))
            if kind == "class":
                found += [documented(f"{name}.{method}", getattr(item, method)) for method in _methods(item, options)]
    return {each.name: each for each in found}


def _methods(cls: type, options: str) -> list[str]:
    """The methods that autodoc shows of a class; properties are not called."""
    own = [name for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, classmethod)]
    listed = re.search(r":members:(.*)", options)
    wanted = re.findall(r"\w+", listed[1]) if listed else []
    public = [name for name in own if not name.startswith("_") and inspect.getdoc(getattr(cls, name))]
    shown = [name for name in public if name in wanted or not wanted] if listed else []
    return shown + (["__call__"] if ":special-members: __call__" in options else [])


REFERENCE = reference()


def bad_summary(each: Documented) -> list[str]:
    """A docstring begins with one line that ends in a period, and a blank line follows."""
    first, *others = each.doc.splitlines() or [""]
    if not re.search(r"[.`]$", first) or not first.endswith(".") or (others and others[0]):
        return [f"{each.name}: a docstring must begin with a sentence in one line, got {first!r}"]
    words = max(len(sentence.split()) for sentence in first.split(". "))
    return [f"{each.name}: its summary has a sentence of {words} words"] if words > LONGEST_SENTENCE else []


def wrong_args(each: Documented) -> list[str]:
    """`Args` names every argument once, and nothing else. One entry may name several, in one line."""
    entries = [re.match(r"((?:\*{0,2}\w+(?:, )?)+): \S", line) for line in each.sections.get("Args", [])]
    named = [name for entry in entries if entry for name in entry[1].split(", ")]
    missing = [name for name in each.parameters if name not in named]
    unknown = [name for name in named if name not in each.parameters or named.count(name) > 1]
    return [f"{each.name}: Args lacks {name}" for name in missing] + [
        f"{each.name}: Args names {name}, which is no argument, or twice" for name in dict.fromkeys(unknown)
    ]


def wrong_returns(each: Documented) -> list[str]:
    """`Returns` is there where a call returns something. Napoleon takes the text before a colon for a type."""
    is_function = inspect.isroutine(each.item)
    returns = is_function and inspect.signature(each.item).return_annotation is not None
    lines = each.sections.get("Returns")
    if returns != (lines is not None):
        return [f"{each.name}: Returns {'is missing' if returns else 'must be left out, for nothing is returned'}"]
    return [f"{each.name}: Returns has a colon in its first line"] if lines and ":" in lines[0] else []


def wrong_raises(each: Documented) -> list[str]:
    """`Raises` names the errors that `caused_errors.py` causes, and is there unless RAISES_NOTHING has a reason."""
    lines = each.sections.get("Raises", [])
    named = {entry[1] for line in lines if (entry := re.match(r"(\w+): \S", line))}
    caused = {error.__name__ for error, _ in caused_errors.CALLS.get(each.name, [])}
    if each.name in RAISES_NOTHING and (named or caused):
        return [f"{each.name}: has errors, and a reason in RAISES_NOTHING"]
    if each.name not in RAISES_NOTHING and not caused:
        return [f"{each.name}: needs a call in caused_errors.py that raises, or a reason in RAISES_NOTHING"]
    return [] if named == caused else [f"{each.name}: Raises names {sorted(named)}, and calls raise {sorted(caused)}"]


def wrong_example(each: Documented) -> list[str]:
    """`Example` is a doctest that runs by itself. Only what needs a GPU is skipped."""
    if "." in without_module(each.name) or each.name in WITHOUT_EXAMPLE:
        return []
    section = "\n".join(each.sections.get("Example", []))
    test = doctest.DocTestParser().get_doctest(section, {}, each.name, None, 0)
    skipped = [example for example in test.examples if doctest.SKIP in example.options]
    if len(test.examples) <= len(skipped) or not any(example.want or skipped for example in test.examples):
        return [f"{each.name}: needs an Example that runs and shows a result"]
    if skipped and each.name not in NEEDS_GPU:
        return [f"{each.name}: skips a line of its Example, and has no reason in NEEDS_GPU"]
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return [f"{each.name}: its Example fails\n{''.join(said)}"] if said else []


RULES = (bad_summary, wrong_args, wrong_returns, wrong_raises)


def test_every_public_name_is_in_the_reference():
    wanted = [*fp8.__all__, *(f"nnx.{name}" for name in jax_fp8.nnx.__all__)]
    assert not set(wanted) - set(REFERENCE)


def test_reasons_are_about_names_that_exist():
    named = {*RAISES_NOTHING, *OTHER_CONSTRUCTORS, *WITHOUT_EXAMPLE, *NEEDS_GPU, *caused_errors.CALLS}
    assert not named - set(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_a_name_documents_itself(name):
    found = [sentence for rule in RULES for sentence in rule(REFERENCE[name])]
    assert not found, "\n".join(found)


@pytest.mark.versions
@pytest.mark.parametrize("name", [name for name in REFERENCE if "." not in without_module(name)])
def test_an_example_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for the files that it writes
    found = wrong_example(REFERENCE[name])
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", caused_errors.CALLS)
def test_an_error_that_a_docstring_names_is_raised(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for error, call in caused_errors.CALLS[name]:
        with pytest.raises(error) as raised:
            call()
        assert type(raised.value) is error


# ---- docstrings that break the rules ---------------------------------------------------------------------------------


GOOD = """Double a number.

Args:
  x: f32[], a number.
  others: more of them.

Returns:
  The double, f32[].

Example:
  >>> 2 * 2
  4
"""


def double(x: float, others: float) -> float:
    return 2 * x


def nothing(x: float, others: float) -> None:
    pass


# A rule, what is replaced in GOOD, and the sentence that must be found.
PLANTED = [
    (bad_summary, "Double a number.", "Double a number", "must begin with a sentence in one line"),
    (bad_summary, "Double a number.", "Double\na number.", "must begin with a sentence in one line"),
    (bad_summary, "a number.\n", "a number" + " and so on" * 10 + ".\n", "has a sentence of 33 words"),
    (wrong_args, "  x: f32[], a number.\n", "", "Args lacks x"),
    (wrong_args, "  x: f32[], a number.\n", "  x:\n", "Args lacks x"),
    (wrong_args, "Args:", "Arguments:", "Args lacks others"),
    (wrong_args, "  others: ", "  others, count: ", "Args names count, which is no argument"),
    (wrong_args, "  others: ", "  x, others: ", "Args names x, which is no argument, or twice"),
    (wrong_returns, "Returns:\n  The double, f32[].\n", "", "Returns is missing"),
    (wrong_returns, "The double, f32[].", "double: f32[].", "Returns has a colon in its first line"),
    (wrong_raises, "", "", "needs a call in caused_errors.py that raises"),
    (wrong_example, "Example:", "Use:", "needs an Example that runs"),
    (wrong_example, "  >>> 2 * 2\n  4\n", "  >>> x = 2\n", "needs an Example that runs and shows a result"),
    (wrong_example, "  4\n", "  5\n", "its Example fails"),
    (wrong_example, "2 * 2", "2 * two", "its Example fails"),
    (wrong_example, "  4\n", "  4\n  >>> 1 / 0  # doctest: +SKIP\n", "has no reason in NEEDS_GPU"),
]


@pytest.mark.parametrize(("rule", "old", "new", "sentence"), PLANTED)
def test_planted_violation_is_found(rule, old, new, sentence):
    assert not any(check(Documented("double", double, GOOD)) for check in (*RULES[:3], wrong_example))
    assert old in GOOD
    found = rule(Documented("double", double, GOOD.replace(old, new)))
    assert any(sentence in each for each in found), found


def test_returns_of_a_function_that_returns_nothing_is_found():
    assert "must be left out" in wrong_returns(Documented("nothing", nothing, GOOD))[0]


def test_errors_that_no_call_causes_are_found():
    """Beside a call that raises a ValueError: Raises with another error, without it, and with a reason against it."""
    doc = "Multiply.\n\nRaises:\n  {}: if it fails.\n"
    assert wrong_raises(Documented("matmul", fp8.matmul, doc.format("ValueError"))) == []
    assert "Raises names ['KeyError']" in wrong_raises(Documented("matmul", fp8.matmul, doc.format("KeyError")))[0]
    assert "Raises names []" in wrong_raises(Documented("matmul", fp8.matmul, "Multiply."))[0]
    assert "a reason in RAISES_NOTHING" in wrong_raises(Documented("E4M3", fp8.E4M3, doc.format("ValueError")))[0]
