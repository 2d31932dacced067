"""The preview as one self-contained HTML page."""

import html
import re
from collections.abc import Sequence
from typing import Any

from trainkit.data.preview import View

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 .3rem; overflow-wrap: anywhere; }
.note { color: #555; margin: 0 0 .6rem; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      background: #f6f6f6; padding: .8rem 1rem; border-radius: 6px; color: #767676; }
.trained { color: #00391d; background: #c9ecd6; border-bottom: 2px solid #11803f; }
.control { border: 1px solid currentColor; border-radius: 3px; padding: 0 .15em; }
.space { opacity: .55; }
table { border-collapse: collapse; } th, td { padding: .2rem .9rem .2rem 0; text-align: right;
      border-bottom: 1px solid #ddd; } th:first-child, td:first-child { text-align: left; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e8; background: #16181a; } pre { background: #202326; color: #9a9a9a; }
  .note { color: #aaa; } .trained { color: #d6ffe6; background: #14492c; border-color: #4cc27f; }
  th, td { border-color: #444; } }
"""


def page(
    views: Sequence[View], roles: Sequence[dict[str, Any]], control: Sequence[str], title: str
) -> str:
    """The page.

    Args:
        views: samples to show.
        roles: rows {role, tokens, trained_tokens}.
        control: the tokenizer's control tokens, framed where they occur.
        title: the page's heading.
    """
    rows = "".join(
        f"<tr><td>{html.escape(row['role'])}</td><td>{row['tokens']:,}</td>"
        f"<td>{row['trained_tokens']:,}</td></tr>"
        for row in roles
    )
    samples = "".join(_sample(view, control) for view in views)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        '<p class="note"><span class="trained">Underlined on green</span> is trained; grey is not. '
        '<span class="control">Framed</span> text is one control token. '
        "↵ is a line break, · a blank before one.</p>"
        "<table><tr><th>written by</th><th>tokens</th><th>trained</th></tr>"
        f"{rows}</table>{samples}</html>\n"
    )


def _sample(view: View, control: Sequence[str]) -> str:
    pieces = []
    for run in view.runs:
        text = _marked(run.text, control)
        pieces.append(f'<span class="trained">{text}</span>' if run.trained else text)
    share = view.num_trained_tokens / len(view.input_ids)
    return (
        f"<h2>{html.escape(view.id)}</h2>"
        f'<p class="note">{html.escape(view.why)} · source {html.escape(view.source)} · '
        f"{len(view.input_ids):,} tokens, {view.num_trained_tokens:,} trained ({share:.0%})</p>"
        f"<pre>{''.join(pieces)}</pre>"
    )


def _marked(text: str, control: Sequence[str]) -> str:
    text = html.escape(text, quote=False)
    for token in control:
        framed = html.escape(token, quote=False)
        text = text.replace(framed, f'<span class="control">{framed}</span>')
    text = re.sub(r" +(?=\n|$)", lambda blanks: "·" * len(blanks[0]), text)
    return text.replace("\n", '<span class="space">↵</span>\n')
