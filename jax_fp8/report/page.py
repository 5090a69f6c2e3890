"""The page of a report: one HTML file, which needs no network and no library. page.css and page.js are part of it."""

from html import escape
from pathlib import Path

from jax_fp8.core.files import read_text, write_bytes
from jax_fp8.report.findings import find
from jax_fp8.report.heading import heading, tiles
from jax_fp8.report.maps import gradient_map, load_map, tensor_map
from jax_fp8.report.run_folder import RunFolder, read_run
from jax_fp8.report.sections import (
    charts_section,
    config_section,
    events_section,
    findings_section,
    map_section,
    tensors_section,
)

NAME = "report.html"
# With this policy a browser loads nothing from the network, whatever the files of the run contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
ABOUT_TENSORS = (
    "Each layer has an input, a kernel and an output gradient, from top to bottom. <b>Saturated</b>: the share of "
    "elements that are too large for FP8 at their scale, and are clipped. <b>Underflowed</b>: the share of elements "
    "that are too small, and become zero. <b>Error</b>: the error of the tensor in FP8, as a relative root mean "
    "square. <b>Headroom</b>: the largest number that the scale can hold, divided by the amax; below 1 the tensor "
    "saturates. <b>Overall</b>: the worst of the first three, as a multiple of its threshold for a finding."
)
ABOUT_LOADS = (
    "How evenly a layer uses its experts. <b>Busiest</b>: the tokens of the expert with the most, as a multiple of the "
    "mean. <b>Idlest</b>: the same of the expert with the fewest. <b>Unused</b>: the share of experts with less than a "
    "sixteenth of the mean. <b>Dropped</b>: the share of the choices of tokens that a capacity dropped. "
    "<b>Entropy</b>: how evenly the router's scores are spread over the experts, for the mean token; 100 % if all are "
    "alike."
)
ABOUT_GRADIENTS = "The norm of each layer's gradient, and its ratio to the median of earlier diagnosed steps."


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run's folder, by default to report.html in it, and return the path. A link at that path is
    replaced; the file that it points to stays as it is.
    """
    run = read_run(folder)
    path = run.path / NAME if output is None else Path(output)
    try:
        write_bytes(path, make_page(run).encode("utf-8", "replace"))  # JSON may have half of a surrogate pair
    except OSError as error:
        raise ValueError(
            f"a report must be written to a file, got {error.strerror} for {path}; choose another with --output"
        ) from None
    return path


def make_page(folder: RunFolder) -> str:
    """The whole page, as text."""
    style, script = (read_text(Path(__file__).with_name(f"page.{kind}")) for kind in ("css", "js"))
    name = escape(folder.path.resolve().name)
    body = [
        heading(folder),
        tiles(folder),
        _remarks(folder),
        findings_section(find(folder), folder),
        charts_section(folder),
        *_diagnosed_sections(folder),
        events_section(folder),
        config_section(folder),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{name}, a run of jax_fp8</title>\n'
        f"<style>\n{style}</style></head>\n<body><main>{''.join(part + chr(10) for part in body if part)}"
        "<noscript><p>The maps are drawn by a script of this page, which this browser does not run.</p></noscript>"
        f'</main><div id="tip" hidden></div>\n<script>\n{script}</script></body></html>\n'
    )


def _remarks(folder: RunFolder) -> str:
    return "".join(f'<p class="remarks">{escape(remark)}</p>' for remark in folder.remarks)


def _diagnosed_sections(folder: RunFolder) -> list[str]:
    """For each diagnosed run, its maps and its worst tensors."""
    sections = []
    for run, diagnosed in folder.diagnosed.items():
        of_run = f" of {run}" if len(folder.diagnosed) > 1 else ""
        if diagnosed.places:
            sections.append(map_section(f"FP8 health{of_run}", ABOUT_TENSORS, run, tensor_map(diagnosed)))
            sections.append(tensors_section(f"Worst-scaled tensors{of_run}", diagnosed))
        if diagnosed.layers:
            data = gradient_map(diagnosed)
            sections.append(map_section(f"Gradient norms{of_run}", ABOUT_GRADIENTS, f"gradients of {run}", data))
        if diagnosed.routers:
            sections.append(
                map_section(f"Load of experts{of_run}", ABOUT_LOADS, f"experts of {run}", load_map(diagnosed))
            )
    return sections
