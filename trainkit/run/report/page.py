"""The look of a report: a page with its style inside, and the few blocks it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "Noto Sans CJK SC",
  sans-serif; color: #222; background: #fff; max-width: 66rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.dim { color: #767676; }
.state { padding: .1rem .6rem; border-radius: 1rem; color: #fff; background: #555; }
.state.done { background: #00734d; }
.state.running { background: #0b5cad; }
.state.failed, .state.interrupted { background: #b34700; }
.warning { border-left: 4px solid #d55e00; padding: .2rem .8rem; background: #fff6f0; }
.figures { display: flex; flex-wrap: wrap; gap: .6rem 2rem; margin: 1rem 0; }
.figures div { font-size: .85rem; color: #555; }
.figures b { display: block; font-size: 1.25rem; color: #222; font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: .5rem 1rem; }
figure { margin: 0; break-inside: avoid; }
figure svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .3rem 0; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top;
  border-bottom: 1px solid #eee; }
td { overflow-wrap: anywhere; min-width: 2.5rem; }
th { font-weight: 600; }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto; font-size: .8rem; line-height: 1.4; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: #c8ecd8; color: inherit; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
@media print {
  body { font-size: 11px; max-width: none; }
  pre { white-space: pre-wrap; }
  tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; }
}
"""


def page(title: str, body: str, *, reload_seconds: int | None = None) -> str:
    """A complete HTML document; ``body`` is HTML already.

    Args:
        title: of the window.
        body: what is in it.
        reload_seconds: for a page that is written again from time to time.
    """
    reload = f'<meta http-equiv="refresh" content="{reload_seconds}">\n' if reload_seconds else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{reload}<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of the page, or nothing if there is nothing to say."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n" if body else ""


def curves(pictures: Iterable[tuple[str, str]]) -> str:
    """Pictures, (title, ``<svg>`` element), side by side where there is room."""
    cells = (f"<figure role='img' aria-label='{escape(t)}'>{svg}</figure>" for t, svg in pictures)
    return f"<div class='curves'>{''.join(cells)}</div>"


def paragraph(text: str, style: str | None = None) -> str:
    """Plain text as a paragraph."""
    attribute = f' class="{style}"' if style else ""
    return f"<p{attribute}>{escape(text)}</p>"


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Numbers with their labels, side by side."""
    cells = (f"<div>{escape(label)}<b>{escape(value)}</b></div>" for label, value in pairs)
    return f"<div class='figures'>{''.join(cells)}</div>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table that scrolls on its own where the screen is narrow."""
    header = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    if not any(head):
        header = ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='wide'><table><tr>{header}</tr>{body}</table></div>"


def details(title: str, body: str) -> str:
    """A part that opens on a click; ``body`` is HTML already."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
