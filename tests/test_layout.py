"""The shape of the source: who may import whom, where imports stand, tests that mirror it, one name for an operation.

Each rule is a function from a source tree to the sentences that say where it is broken; each is also tried on a tree
that breaks it.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MAX_LINES = 330  # about 300: what is read in one sitting
MAX_COLUMNS = 120
MAX_ANY = 100  # in annotations of the package: where jax's and Flax's own types have nothing better

# A room and the rooms it may import. The files directly in jax_fp8/ stand above all rooms.
ROOMS = {
    "core": {"core"},
    "kernels": {"core", "jaxprs", "kernels"},
    "ops": {"core", "kernels", "ops"},
    "nn": {"core", "kernels", "ops", "nn"},
    "models": {"core", "kernels", "ops", "nn", "models"},
    "jaxprs": {"jaxprs"},
    "parallel": {"core", "ops", "parallel"},
    "optim": {"core", "kernels", "optim"},
    "grads": {"core", "kernels", "ops", "jaxprs", "grads"},
    "state": {"core", "kernels", "ops", "optim", "parallel", "grads", "state"},
    "distributed": {"core", "kernels", "ops", "optim", "jaxprs", "parallel", "grads", "state", "distributed"},
}
ROOMS["train"] = ROOMS["distributed"] | {"train"}
ROOMS |= {
    "nnx": ROOMS["train"] | {"nn", "nnx"},
    "integrations": ROOMS["train"] | {"nn", "nnx", "integrations"},
    "inspect": ROOMS["train"] | {"inspect"},
    "tune": ROOMS["train"] | {"inspect", "tune"},
    "plan": ROOMS["train"] | {"nn", "models", "inspect", "tune", "plan"},
    "report": {"core", "report"},
}
# What a person runs stands above all rooms, beside the files in jax_fp8/ that it reads; only cli.py starts it.
ROOMS["run"] = {*ROOMS, "run", "streams"}
NOT_PUBLIC = ("jax._src", "jax.experimental.hijax", "jax.custom_remat")

# (file, imported module): why the import cannot stand at the top.
LATE_IMPORTS: dict[tuple[str, str], str] = {
    ("benchmarks/maxtext_step.py", "jax"): "the process that starts the others must not hold a GPU",
    ("benchmarks/maxtext_step.py", "jax_fp8.integrations.maxtext"): "as jax",
    ("benchmarks/maxtext_step.py", "maxtext.trainers.pre_train.train"): "as jax",
    ("benchmarks/run_costs.py", "jax_fp8.run.checkpoints"): "needs Orbax, and the steps are timed without it",
    ("jax_fp8/cli.py", "jax_fp8.run"): "needs the packages of the extra `train`, which no other command does",
    ("jax_fp8/run/records.py", "jax_fp8.run"): "its parquet.py needs pyarrow, which text and .jsonl do not",
}

# Source file: why it has no test file of its own.
WITHOUT_OWN_TEST: dict[str, str] = {
    "jax_fp8/__main__.py": "one call of cli.main, made by tests/test_cli.py",
    "jax_fp8/ops/weight_version.py": "tests/state/test_weight_cache.py and tests/models/test_decoder.py change params",
    "jax_fp8/run/command_line.py": "tests/run/test_checks.py, test_generate.py and test_export.py parse by it",
    "jax_fp8/core/types.py": "names for annotations, without code",
    "jax_fp8/core/frozen.py": "the place of a frozen kernel; tests/state/test_frozen_kernels.py fills it",
    "jax_fp8/kernels/gemm_parts.py": "tests/kernels/test_gemm.py and test_few_rows_gemm.py multiply by them",
    "jax_fp8/ops/gemm_residual.py": "tests/ops/test_passes.py makes one and reads it",
    "jax_fp8/nn/declared_gemm.py": "tests/nn/test_gemm.py declares some, and tests/nn/test_lora.py multiplies by them",
    "jax_fp8/ops/adapters.py": "tests/nn/test_lora.py multiplies by adapters in every layer",
    "jax_fp8/nn/router.py": "tests/nn/test_moe.py names its variables and reads its bias",
    "jax_fp8/optim/parts.py": "tests/optim/test_freeze.py and test_balance.py update parts, in place and otherwise",
    "jax_fp8/nnx/product.py": "tests/nnx/test_layers.py and test_adapters.py multiply by every kind",
    "jax_fp8/plan/choices.py": "tests/plan/test_gpt_plans.py makes models and optimizers of them",
    "jax_fp8/plan/setting.py": "numbers; tests/plan/test_arithmetic.py and test_suggest.py make many",
    "jax_fp8/models/config_checks.py": "tests/models/test_config.py makes a config of each mistake",
    "jax_fp8/models/huggingface/families.py": "tables; test_fields.py compares them with those of transformers",
    "jax_fp8/models/huggingface/writing.py": "test_config_json.py and test_reading.py read what it writes",
    "jax_fp8/models/huggingface/json_files.py": "test_weights.py and test_peft.py read files that are wrong or missing",
    "jax_fp8/models/huggingface/peft_config.py": "test_peft.py reads files with each field that is refused",
    "jax_fp8/models/huggingface/peft_layout.py": "test_peft.py reads and writes matrices of one layer and of several",
    "jax_fp8/models/huggingface/naming.py": "test_weights.py reads files of all these kinds",
    "jax_fp8/integrations/vmapped.py": "tests/integrations/test_haliax.py and test_equinox.py multiply by its product",
    "jax_fp8/integrations/modules.py": "tests/integrations/test_haliax.py and test_equinox.py choose layers by it",
    "jax_fp8/report/finding.py": "a tuple and the words for its fields, without code",
}

# File: why it is longer than MAX_LINES.
LONG_FILES: dict[str, str] = {
    "csrc/adam.cc": "the checks of every array of a leaf, in the order in which it is read",
    "tests/test_layout.py": "every rule beside the trees that break it",
    "tests/gpu/activation_check.py": "a script for a device, with its oracle beside its checks",
    "tests/gpu/adam_check.py": "a script for a device, with its oracle beside its checks",
    "tests/gpu/cross_entropy_check.py": "a script for a device, with its oracle beside its checks",
    "tests/gpu/kernel_check.py": "a script for a device: what several kernels share, each check beside its controls",
    "tests/gpu/transformers_check.py": "a script, with the models and the lists of fields beside its checks",
    "tests/gpu/norm_check.py": "a script for a device, with its oracle beside its checks",
}

# File: why it opens, reads or writes files by itself, and not by jax_fp8/core/files.py.
OWN_FILES: dict[str, str] = {
    "jax_fp8/core/files.py": "the place where it is done",
    "jax_fp8/kernels/extension.py": "sources that come with the package",
    "jax_fp8/streams.py": "os.devnull, in place of a stream",
    "jax_fp8/plan/described.py": "a description that comes with the package",
    "jax_fp8/train/lowering.py": "a listing that the compiler has written to a folder of ours",
    "examples/train_gpt.py": "a reader's own program, which the library's files do not concern",
    "jax_fp8/run/folder.py": "a folder is opened, to be locked",
    "jax_fp8/run/logs.py": "rows are appended to a log",
}
# Functions that touch files: methods of a path, and functions of modules.
OF_PATHS = (
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "rename",
    "symlink_to",
    "hardlink_to",
    "touch",
)
OF_MODULES = r"(open|io\.open|os\.(open|fdopen|replace|rename|link|symlink)|json\.(load|dump)|pickle\.(load|dump)"
OF_MODULES += r"|shutil\.(copy\w*|move)|tempfile\.(mkstemp|NamedTemporaryFile)|(np|jnp|numpy)\.(load|save\w*|fromfile))"

# File: why its lines may end beyond MAX_COLUMNS. It goes as soon as they no longer do.
LONG_LINES: dict[str, str] = {}


def python_files(root: pathlib.Path, *folders: str) -> Iterator[tuple[pathlib.Path, ast.Module]]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root), parsed(path.read_text())


@functools.cache
def parsed(text: str) -> ast.Module:
    """One tree of each text, which several rules read."""
    return ast.parse(text)


def imported_names(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the dotted names it asks for: `from a import b` asks for "a.b"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node, f"{prefix}.{alias.name}") for alias in node.names)


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def upward_imports(root: pathlib.Path) -> list[str]:
    """Imports of a room by a room that stands below or beside it, and of rooms nobody has declared."""
    broken = []
    for path, tree in python_files(root, "jax_fp8"):
        if len(path.parts) < 3:
            continue
        room = path.parts[1]
        if room not in ROOMS:
            broken.append(f"{path}: room {room!r} must be declared in ROOMS")
            continue
        for node, name in imported_names(tree):
            parts = name.split(".")
            if parts[0] == "jax_fp8" and (len(parts) < 3 or parts[1] not in ROOMS[room]):
                broken.append(f"{path}:{node.lineno}: {room} must import only {sorted(ROOMS[room])}, got {name}")
    return broken


def import_circles(root: pathlib.Path) -> list[str]:
    """Modules that import themselves through others."""
    files = {module_name(path): tree for path, tree in python_files(root, "jax_fp8")}

    def module_of(name):
        return name if name in files else name.rpartition(".")[0]

    edges = {
        module: {
            target for _, name in imported_names(tree) if (target := module_of(name)) in files and target != module
        }
        for module, tree in files.items()
    }
    finished, circles = set(), []

    def visit(module, path):
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in finished:
            for target in sorted(edges[module]):
                visit(target, [*path, module])
            finished.add(module)

    for module in sorted(edges):
        visit(module, [])
    return circles


def misplaced_imports(root: pathlib.Path) -> list[str]:
    """Relative imports, and imports inside functions that LATE_IMPORTS does not excuse."""
    broken = []
    for path, tree in python_files(root, "jax_fp8", "examples", "benchmarks"):
        for node, name in imported_names(tree):
            if name.startswith("."):
                broken.append(f"{path}:{node.lineno}: imports must be absolute, got {name}")
        functions = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ]
        late = {(node.lineno, name) for function in functions for node, name in imported_names(function)}
        for line, name in sorted(late):
            if not any(str(path) == file and name.startswith(module) for file, module in LATE_IMPORTS):
                broken.append(f"{path}:{line}: imports must stand at the top, got {name} inside a function")
    return broken


def private_names(root: pathlib.Path) -> list[str]:
    """Uses of what jax does not promise to keep."""
    broken = []
    for path, tree in python_files(root, "jax_fp8", "examples", "benchmarks", "tests"):
        used = [(node.lineno, ast.unparse(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used += [(node.lineno, name) for node, name in imported_names(tree)]
        for line, name in used:
            for private in NOT_PUBLIC:
                if name == private or name.startswith(private + "."):
                    broken.append(f"{path}:{line}: {private} is not public, use what jax documents")
    return sorted(set(broken))


def mirror_gaps(root: pathlib.Path) -> list[str]:
    """Source files without a test file at the same place, test files without a source, excuses that excuse nothing."""
    sources = {path for path, _ in python_files(root, "jax_fp8") if path.name != "__init__.py"}
    wanted = {path: pathlib.Path("tests", *path.parts[1:-1], f"test_{path.name}") for path in sources}
    broken = []
    for source, test in sorted(wanted.items()):
        if (root / test).exists() == (str(source) in WITHOUT_OWN_TEST):
            broken.append(f"{source}: needs either {test} or a reason in WITHOUT_OWN_TEST, and not both")
    for excused in WITHOUT_OWN_TEST:
        if root == ROOT and pathlib.Path(excused) not in sources:
            broken.append(f"{excused}: is in WITHOUT_OWN_TEST and does not exist")
    kernels = sorted(path.relative_to(root) for path in (root / "csrc").glob("*.cu"))
    wanted |= {path: pathlib.Path("tests/csrc", f"test_{path.stem}.py") for path in kernels}
    for kernel in kernels:
        if not (root / wanted[kernel]).exists():
            broken.append(f"{kernel}: needs {wanted[kernel]}, which runs it on the CPU")
    # Headers and handlers, where there is one.
    headers = sorted(path.relative_to(root) for path in (root / "csrc/device").glob("*.cuh"))
    wanted |= {path: pathlib.Path("tests/csrc/device", f"test_{path.stem}.py") for path in headers}
    others = [*(root / "csrc").glob("*.h"), *(root / "csrc").glob("*.cc")]
    wanted |= {path: pathlib.Path("tests/csrc", f"test_{path.stem}.py") for path in others}
    for room in (*ROOMS, "csrc"):
        for test in sorted((root / "tests" / room).rglob("test_*.py")):
            if test.relative_to(root) not in wanted.values():
                broken.append(f"{test.relative_to(root)}: has no source file that it mirrors")
    return broken


def operation_names(root: pathlib.Path) -> list[str]:
    """Operations, the files in csrc/ that define an XLA handler, that lack a part or are called otherwise in Python."""
    handlers = {path.stem for path in (root / "csrc").glob("*.cc") if "XLA_FFI_DEFINE_HANDLER" in path.read_text()}
    kernels = {path.stem for path in (root / "csrc").glob("*.cu")}
    broken = [f"csrc/{name}.cu: must have its handler in csrc/{name}.cc" for name in sorted(kernels - handlers)]
    for name in sorted(handlers):
        for needed in (f"csrc/{name}.h", f"jax_fp8/kernels/{name}.py", f"tests/kernels/test_{name}.py"):
            if not (root / needed).exists():
                broken.append(f"csrc/{name}.cc: must have {needed}")
        caller = root / "jax_fp8/kernels" / f"{name}.py"
        if caller.exists() and not re.search(rf'"jax_fp8_{name}(_\w+)?"', caller.read_text()):
            broken.append(f"jax_fp8/kernels/{name}.py: must call the target jax_fp8_{name}, or one that begins so")
    table = root / "csrc/module.cc"
    for target in re.findall(r'table\["jax_fp8_(\w+)"\]', table.read_text() if table.exists() else ""):
        if not any(target == name or target.startswith(f"{name}_") for name in handlers):
            broken.append(f"csrc/module.cc: target jax_fp8_{target} must begin with an operation: {sorted(handlers)}")
    return broken


def source_lines(root: pathlib.Path) -> dict[str, list[str]]:
    """The lines of every source, by the name of its file."""
    folders = ("jax_fp8", "csrc", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*"))]
    sources = [path for path in paths if path.suffix in (".py", ".cc", ".cu", ".cuh", ".h")]
    return {str(path.relative_to(root)): path.read_text().splitlines() for path in sources}


def long_files(root: pathlib.Path) -> list[str]:
    """Files that cannot be read in one sitting, and excuses that excuse nothing."""
    broken = []
    for name, lines in source_lines(root).items():
        if (len(lines) > MAX_LINES) != (name in LONG_FILES):
            broken.append(f"{name}: needs at most {MAX_LINES} lines, or a reason in LONG_FILES, got {len(lines)}")
    return broken


def kernels_without_mistakes(root: pathlib.Path) -> list[str]:
    """Kernels in whose tests no mistake is planted: whether these notice anything would not be known."""
    tests = [root / "tests/csrc" / f"test_{path.stem}.py" for path in sorted((root / "csrc").glob("*.cu"))]
    return [
        f"{test.relative_to(root)}: must plant mistakes in the kernel, parametrised over emulation.planted(...)"
        for test in tests
        if test.exists() and '"mistake", planted(' not in test.read_text()
    ]


def unknown_commands(root: pathlib.Path) -> list[str]:
    """Commands that a text names and the Makefile lacks, and continuous integration without README's `make test`."""
    makefile, integration = root / "Makefile", root / ".ci/run"
    texts = [root / "README.md", root / "BUILD.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    targets = re.findall(r"^([a-z-]+):", makefile.read_text() if makefile.exists() else "", re.MULTILINE)
    broken = []
    for path in (*texts, integration):
        text = path.read_text() if path.exists() else ""
        named = re.findall(r"(?:^ *|`)make(?: --jobs \d)? ([a-z-]+)", text, re.MULTILINE)
        broken += [f"{path.name}: make {name} is no target of the Makefile" for name in named if name not in targets]
        if path == integration and text and "test" not in named:
            broken.append(".ci/run: must run README's `make test`")
    return broken


def decisions_by_recipe(root: pathlib.Path) -> list[str]:
    """Questions which recipe one is, outside of the room that knows recipes; the files directly in jax_fp8/ may ask."""
    broken = []
    for path, tree in python_files(root, "jax_fp8"):
        if len(path.parts) < 3 or path.parts[1] == "core":
            continue
        for node in ast.walk(tree):
            asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type")
            compares = isinstance(node, ast.Compare | ast.MatchClass)
            if (asks or compares) and re.search(r"\b\w+Scaling\b", ast.unparse(node)):
                broken.append(f"{path}:{node.lineno}: only core may ask which recipe one is, got {ast.unparse(node)}")
    return broken


def files_by_themselves(root: pathlib.Path) -> list[str]:
    """Code that opens, reads or writes files by itself: what it writes another may mix with or lead elsewhere by a
    link, what it reads may have no end. And excuses that excuse nothing.
    """
    found: dict[str, list[str]] = {}
    for path, tree in python_files(root, "jax_fp8", "examples"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                is_method = isinstance(node.func, ast.Attribute) and node.func.attr in OF_PATHS
                if (is_method and not re.fullmatch(r"self\.\w+", name)) or re.fullmatch(OF_MODULES, name):
                    found.setdefault(str(path), []).append(f"{path}:{node.lineno}: {name}")
    broken = [
        f"{where} must be done by jax_fp8/core/files.py, or have a reason in OWN_FILES"
        for path, places in found.items()
        for where in places
        if path not in OWN_FILES
    ]
    if root == ROOT:
        broken += [f"{path}: is in OWN_FILES and touches no file" for path in OWN_FILES if path not in found]
    return broken


def long_lines(root: pathlib.Path) -> list[str]:
    """Files with lines that end beyond the last column, and excuses that excuse nothing."""
    broken = []
    for name, lines in source_lines(root).items():
        found = [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
        if bool(found) != (name in LONG_LINES):
            broken.append(f"{name}: needs lines of at most {MAX_COLUMNS}, or a reason in LONG_LINES, longer: {found}")
    return broken


def anys(root: pathlib.Path) -> list[str]:
    """The files with most annotations `Any`, if the package has too many."""
    found = {
        str(path): sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))
        for path, tree in python_files(root, "jax_fp8")
    }
    if sum(found.values()) <= MAX_ANY:
        return []
    most = sorted(found, key=lambda path: -found[path])[:10]
    return [
        f"{path}: has {found[path]} `Any`, of {MAX_ANY} in all; name the type, or use core/types.py" for path in most
    ]


def names_in_strings(root: pathlib.Path) -> list[str]:
    """Strings such as "jax_fp8.room.file.name", by which tests replace a function, that name nothing. Those of slow
    tests would be noticed last.
    """
    broken = []
    for path, tree in python_files(root, "tests", "benchmarks"):
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if re.fullmatch(r"jax_fp8(\.\w+)+", node.value) and not _is_named(root, node.value.split(".")):
                broken.append(f"{path}:{node.lineno}: {node.value} must name a module of the package, or a name in one")
    return broken


def _is_named(root: pathlib.Path, parts: list[str]) -> bool:
    """Whether these are the parts of a module's name, perhaps with a name that the module's text has behind them."""
    for count in range(len(parts), 0, -1):
        module = root.joinpath(*parts[:count])
        file = next((f for f in (module.with_suffix(".py"), module / "__init__.py") if f.exists()), None)
        if file is not None:
            return count == len(parts) or re.search(rf"\b{parts[count]}\b", file.read_text()) is not None
    return False


RULES = (
    names_in_strings,
    upward_imports,
    import_circles,
    misplaced_imports,
    private_names,
    mirror_gaps,
    operation_names,
    decisions_by_recipe,
    files_by_themselves,
    long_files,
    long_lines,
    anys,
    kernels_without_mistakes,
    unknown_commands,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_tree(rule):
    assert any(python_files(ROOT, "jax_fp8"))
    broken = rule(ROOT)
    assert not broken, "\n".join(["", *broken])


# A rule, the files that break it, and the sentence that must be found.
PLANTED = [
    (
        names_in_strings,
        {"jax_fp8/core/a.py": "def f(): ...", "tests/test_a.py": 'replace("jax_fp8.core.a.f", "jax_fp8.core.a.g")'},
        "jax_fp8.core.a.g must name a module of the package",
    ),
    (names_in_strings, {"tests/test_a.py": 'replace("jax_fp8.core.gone.f")'}, "jax_fp8.core.gone.f must name"),
    (upward_imports, {"jax_fp8/core/a.py": "from jax_fp8.ops import gemm"}, "core must import only"),
    (upward_imports, {"jax_fp8/train/a.py": "import jax_fp8.nn.dense"}, "got jax_fp8.nn.dense"),
    (
        upward_imports,
        {"jax_fp8/parallel/a.py": "def f():\n    from jax_fp8.models.gpt import GPT"},
        "got jax_fp8.models.gpt.GPT",
    ),
    (upward_imports, {"jax_fp8/ops/a.py": "import jax_fp8"}, "got jax_fp8"),
    (upward_imports, {"jax_fp8/kernels/a.py": "from jax_fp8.ops import linear"}, "kernels must import only"),
    (upward_imports, {"jax_fp8/train/a.py": "from jax_fp8.inspect import capture"}, "train must import only"),
    (upward_imports, {"jax_fp8/optim/a.py": "from jax_fp8.train import train_step"}, "optim must import only"),
    (upward_imports, {"jax_fp8/inspect/a.py": "from jax_fp8.nn import dense"}, "inspect must import only"),
    (upward_imports, {"jax_fp8/utils/a.py": ""}, "must be declared in ROOMS"),
    (
        import_circles,
        {
            "jax_fp8/ops/a.py": "import jax_fp8.ops.b",
            "jax_fp8/ops/b.py": "from jax_fp8.ops import c",
            "jax_fp8/ops/c.py": "from jax_fp8.ops.a import f",
        },
        "jax_fp8.ops.a -> jax_fp8.ops.b -> jax_fp8.ops.c -> jax_fp8.ops.a",
    ),
    (misplaced_imports, {"jax_fp8/core/a.py": "from . import b"}, "must be absolute"),
    (misplaced_imports, {"jax_fp8/core/a.py": "def f():\n    import os"}, "must stand at the top"),
    (private_names, {"jax_fp8/core/a.py": "from jax._src import core"}, "jax._src is not public"),
    (
        private_names,
        {"jax_fp8/core/a.py": "from jax.experimental import hijax"},
        "jax.experimental.hijax is not public",
    ),
    (private_names, {"tests/test_a.py": "import jax\njax._src.core.Tracer"}, "jax._src is not public"),
    (mirror_gaps, {"jax_fp8/core/a.py": ""}, "jax_fp8/core/a.py: needs either tests/core/test_a.py"),
    (mirror_gaps, {"tests/ops/test_a.py": ""}, "has no source file"),
    (mirror_gaps, {"csrc/a.cu": ""}, "csrc/a.cu: needs tests/csrc/test_a.py"),
    (mirror_gaps, {"tests/csrc/test_a.py": ""}, "has no source file"),
    (mirror_gaps, {"tests/csrc/device/test_a.py": "", "csrc/device/b.cuh": ""}, "has no source file"),
    (operation_names, {"csrc/a.cu": ""}, "must have its handler"),
    (operation_names, {"csrc/a.cc": "XLA_FFI_DEFINE_HANDLER(a)", "csrc/a.h": ""}, "must have jax_fp8/kernels/a.py"),
    (operation_names, {"csrc/module.cc": 'table["jax_fp8_b"] = handler'}, "target jax_fp8_b must begin"),
    (
        operation_names,
        {"csrc/a.cc": "XLA_FFI_DEFINE_HANDLER(a)", "jax_fp8/kernels/a.py": 'ffi_call("jax_fp8_b")'},
        "must call the target jax_fp8_a",
    ),
    (
        decisions_by_recipe,
        {"jax_fp8/ops/a.py": "def f(recipe):\n    return isinstance(recipe, CurrentScaling)"},
        "only core may ask which recipe one is, got isinstance(recipe, CurrentScaling)",
    ),
    (
        decisions_by_recipe,
        {"jax_fp8/train/a.py": "def f(recipe):\n    return type(recipe) is DelayedScaling"},
        "got type(recipe) is DelayedScaling",
    ),
    (
        files_by_themselves,
        {"jax_fp8/core/a.py": "open('a', 'w')"},
        "a.py:1: open must be done by jax_fp8/core/files.py",
    ),
    (
        files_by_themselves,
        {"jax_fp8/run/a.py": "class A:\n    def f(self):\n        self.path.open('a')"},
        "self.path.open must be done",
    ),
    (
        files_by_themselves,
        {"jax_fp8/report/a.py": "def f(path):\n    path.write_text('')"},
        "a.py:2: path.write_text must be",
    ),
    (files_by_themselves, {"examples/a.py": "import os\nos.replace('a', 'b')"}, "a.py:2: os.replace must be done by"),
    (
        files_by_themselves,
        {"examples/a.py": "from pathlib import Path\nPath('a').read_text()"},
        "Path('a').read_text must",
    ),
    (files_by_themselves, {"jax_fp8/ops/a.py": "import json\njson.load(open('a'))"}, "a.py:2: json.load must be done"),
    (long_files, {"csrc/a.cu": "\n" * (MAX_LINES + 1)}, f"got {MAX_LINES + 1}"),
    (long_lines, {"csrc/a.cu": "\n" + "/" * (MAX_COLUMNS + 1)}, "longer: [2]"),
    (anys, {"jax_fp8/core/a.py": f"def f(x: tuple[{'Any, ' * (MAX_ANY + 1)}]): pass"}, f"has {MAX_ANY + 1} `Any`"),
    (kernels_without_mistakes, {"csrc/a.cu": "", "tests/csrc/test_a.py": ""}, "must plant mistakes"),
    (unknown_commands, {"BUILD.md": "    make tset"}, "make tset is no target"),
    (unknown_commands, {"docs/a.md": "`make tset`"}, "a.md: make tset is no target"),
    (unknown_commands, {".ci/run": "make lint", "Makefile": "lint:"}, "must run README's `make test`"),
]


@pytest.mark.parametrize(("rule", "files", "sentence"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_planted_violation_is_found(tmp_path, rule, files, sentence):
    assert rule(tmp_path) == []
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert any(sentence in found for found in rule(tmp_path)), rule(tmp_path)
