"""The preview as one self-contained HTML page."""

import html
import re
from collections.abc import Sequence
from typing import Any

from trainkit.data.build.dropped import DroppedRow
from trainkit.data.look.preview import View
from trainkit.terminal import visible

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 .3rem; overflow-wrap: anywhere; }
.note { color: #555; margin: 0 0 .6rem; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      background: #f6f6f6; padding: .8rem 1rem; border-radius: 6px; color: #767676; }
.trained { color: #00391d; background: #c9ecd6; border-bottom: 2px solid #11803f; }
.missed { color: #7a0010; background: #ffd9dc; border-bottom: 2px dashed #c2001d; }
.control { border: 1px solid currentColor; border-radius: 3px; padding: 0 .15em; }
.space { opacity: .55; }
table { border-collapse: collapse; } th, td { padding: .2rem .9rem .2rem 0; text-align: right;
      border-bottom: 1px solid #ddd; } th:first-child, td:first-child { text-align: left; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e8; background: #16181a; } pre { background: #202326; color: #9a9a9a; }
  .note { color: #aaa; } .missed { color: #ffd5d9; background: #5a1018; }
  .trained { color: #d6ffe6; background: #14492c; border-color: #4cc27f; }
  th, td { border-color: #444; } }
"""


def page(
    views: Sequence[View],
    roles: Sequence[dict[str, Any]],
    control: Sequence[str],
    title: str,
    dropped: Sequence[DroppedRow] = (),
) -> str:
    """The page.

    Args:
        views: samples to show.
        roles: rows {role, tokens, trained_tokens}.
        control: the tokenizer's control tokens, framed where they occur.
        title: the page's heading.
        dropped: rows that are not used.
    """
    rows = "".join(
        f"<tr><td>{html.escape(row['role'])}</td><td>{row['tokens']:,}</td>"
        f"<td>{row['trained_tokens']:,}</td></tr>"
        for row in roles
    )
    samples = "".join(_sample(view, control) for view in views)
    samples += "".join(_dropped(row) for row in dropped)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        '<p class="note"><span class="trained">Underlined on green</span> is trained; grey is not. '
        '<span class="missed">Dashed on red</span> are words of an answer that are not trained. '
        '<span class="control">Framed</span> text is one control token. '
        "↵ is a line break, · a blank before one.</p>"
        "<table><tr><th>written by</th><th>tokens</th><th>trained</th></tr>"
        f"{rows}</table>{samples}</html>\n"
    )


def _sample(view: View, control: Sequence[str]) -> str:
    pieces = []
    for run in view.runs:
        text = _marked(run.text, control)
        kind = "trained" if run.trained else "missed" if run.missed else ""
        pieces.append(f'<span class="{kind}">{text}</span>' if kind else text)
    share = view.num_trained_tokens / len(view.input_ids)
    return (
        f"<h2>{html.escape(visible(view.id))}</h2>"
        f'<p class="note">{html.escape(view.why)} · source {html.escape(view.source)} · '
        f"{len(view.input_ids):,} tokens, {view.num_trained_tokens:,} trained ({share:.0%})</p>"
        f"<pre>{''.join(pieces)}</pre>"
    )


def _dropped(row: DroppedRow) -> str:
    title, why, text = (html.escape(visible(t)) for t in (row.id, row.detail, row.excerpt))
    note = f"not used ({html.escape(row.reason)}): {why}"
    return f'<h2>{title}</h2><p class="note">{note}</p><pre>{text}</pre>'


def _marked(text: str, control: Sequence[str]) -> str:
    text = html.escape(visible(text), quote=False)
    for token in control:
        framed = html.escape(token, quote=False)
        text = text.replace(framed, f'<span class="control">{framed}</span>')
    text = re.sub(r" +(?=\n|$)", lambda blanks: "·" * len(blanks[0]), text)
    return text.replace("\n", '<span class="space">↵</span>\n')
