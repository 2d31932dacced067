"""No chat template takes long or much memory; what templates do goes on."""

import sys

import pytest
from tiny import make_tokenizer

from trainkit.data import Source
from trainkit.data import template as bounded
from trainkit.data.formats import read_row
from trainkit.data.messages import RowError
from trainkit.data.options import DataOptions
from trainkit.data.template import ChatTemplate
from trainkit.errors import DataError, TrainkitError

GROWN = (
    "{% set ns = namespace(s=%s) %}{% for i in range(60) %}{% set ns.s = %s %}{% endfor %}{{ %s }}"
)


def grown(start, step, shown="ns.s|length"):
    """Something that doubles sixty times."""
    return GROWN.replace("%s", start, 1).replace("%s", step, 1).replace("%s", shown, 1)


BOMBS = [
    "{{ 10**(10**10) }}",
    "{% set n = 10 %}{{ n**(n**n) }}",
    "{{ 1.0 * 9**(9**9) }}",
    grown("9", "ns.s * ns.s"),
    "{{ ('a' * 10**10)|length }}",
    "{{ (10**10 * 'a')|length }}",
    "{{ ([0] * 10**10)|length }}",
    "{{ ((0,) * 10**10)|length }}",
    "{{ ('a' * 10**8 * 10**8)|length }}",
    grown("'a'", "ns.s ~ ns.s"),
    grown("'a'", "ns.s + ns.s"),
    grown("[0]", "ns.s + ns.s"),
    grown("'ab'", "ns.s|replace('a', ns.s)"),
    grown("'ab'", "ns.s.replace('a', ns.s)"),
    grown("'a'", "[ns.s, ns.s]|join"),
    grown("'a'", "ns.s.join([ns.s, ns.s])"),
    grown("'a'", "'%s%s' % (ns.s, ns.s)"),
    grown("'a'", "'{0}{0}'.format(ns.s)"),
    grown("'a'", "'{a}{a}'.format_map({'a': ns.s})"),
    grown("'a'", "'%s%s'|format(ns.s, ns.s)"),
    grown("[0]", "[ns.s, ns.s]", "ns.s"),
    grown("[0]", "[ns.s, ns.s]", "ns.s ~ ''"),
    grown("[0]", "[ns.s, ns.s]", "ns.s|string|length"),
    grown("{'a': 0}", "{'a': ns.s, 'b': ns.s}", "ns.s|tojson|length"),
    grown("[0]", "[ns.s, ns.s]", "('%s' % [ns.s])|length"),
    "{{ ('%1000000000d' % 1)|length }}",
    "{{ ('%*d' % (1000000000, 1))|length }}",
    "{{ '%1000000000d'|format(1)|length }}",
    "{{ '{:1000000000d}'.format(1)|length }}",
    "{{ '{:{}d}'.format(1, 1000000000)|length }}",
    "{{ '{a:{b}}'.format_map({'a': 1, 'b': 1000000000})|length }}",
    "{{ '{:.1000000000f}'.format(1.0)|length }}",
    "{{ 'a'|center(10**9)|length }}",
    "{{ 'a'|center(1000000000)|length }}",
    "{{ 'a'.center(1000000000)|length }}",
    "{{ 'a'.ljust(1000000000)|length }}",
    "{{ 'a'.rjust(width)|length }}",
    "{{ 'a'.zfill(1000000000)|length }}",
    "{{ '\\t'.expandtabs(1000000000)|length }}",
    "{{ 'a\\na'|indent(1000000000)|length }}",
    "{{ 'a\\na'|indent(width=1000000000)|length }}",
    "{{ ['a']|map('center', 1000000000)|first|length }}",
    "{{ messages|tojson(indent=1000000000)|length }}",
    "{{ [1]|batch(1000000000, 'x')|first|length }}",
    "{{ [1]|slice(1000000000)|list|length }}",
    "{{ 1.5|round(1000000000, 'ceil') }}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{% set s = 'a' * 30000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{% macro m(s) %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endmacro %}"
    "{{ m('a' * 30000000)|length }}",
    "{% set ns = namespace(l=[]) %}{% set s = 'a' * 30000000 %}"
    "{% for i in range(99) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}{{ ns.l|length }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
]


@pytest.fixture
def hurried(monkeypatch):
    """Seconds are not waited for; what is let go of without memory, pytest cannot tell of."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(bounded, "SECONDS", 0.05)
    monkeypatch.setattr(bounded, "MEMORY", 2**26)


@pytest.mark.parametrize("bomb", BOMBS, ids=map(str, range(len(BOMBS))))
def test_it_is_refused(bomb, hurried):
    template = ChatTemplate(make_tokenizer(), DataOptions())
    template._frozen, template.kwargs = bomb, {"width": 10**9}
    with pytest.raises((RowError, TrainkitError)):
        template.render([{"role": "user", "content": "q"}])


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """As before a process has trained."""
    monkeypatch.setattr(bounded, "_may_limit_memory", True)


def test_where_other_threads_need_memory_none_is_withheld(monkeypatch):
    """The limit is the process's: a checkpoint that is being saved would fail by it."""
    monkeypatch.setattr(bounded, "MEMORY", 2**20)
    template = ChatTemplate(make_tokenizer(), DataOptions())
    template._frozen = "{{ ('a' * 10**8)|length }}"
    with pytest.raises(RowError, match="more than 1 MiB"):
        template.render([{"role": "user", "content": "q"}])
    bounded.leave_memory_alone()
    assert template.render([{"role": "user", "content": "q"}]) == "100000000"


def test_what_takes_too_much_memory_is_told_of_it(monkeypatch):
    monkeypatch.setattr(bounded, "MEMORY", 2**26)
    template = ChatTemplate(make_tokenizer(), DataOptions())
    template._frozen = "{{ ('a' * 10**9)|length }}"
    with pytest.raises(RowError, match="one row takes more than 64 MiB"):
        template.render([{"role": "user", "content": "q"}])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{ 2**10 * 3 % 7 + 1 }}", "7"),
        ("{{ 'ab' * 3 ~ 'c' ~ 1 }}", "abababc1"),
        ("{{ [1] * 2 + [3] }}{{ (1,) + (2,) }}", "[1, 1, 3](1, 2)"),
        ("{{ '%5.1f|%-4s|%d%%' % (1.25, 'a', 10**12) }}", "  1.2|a   |1000000000000%"),
        ("{{ '{:>4}|{a:{b}}'.format(1, a=2, b=3) }}", "   1|  2"),
        ("{{ 'a'|center(5) }}{{ 'a\nb'|indent(2) }}{{ 'a'.zfill(3) }}", "  a  a\n  b00a"),
        ("{{ 'aXa'|replace('X', 'yy') }}{{ 'aXa'.replace('X', '') }}", "ayyaaa"),
        ("{{ ['a', 1]|join(', ') }}{{ ','.join(['b', 'c']) }}", "a, 1b,c"),
        ("{{ {'n': 10**15, 'k': [1, {'a': none}]}|tojson(indent=2)|length }}", "76"),
        ("{{ [1, 2, 3]|batch(2, 0)|list }}{{ none }}{{ missing }}", "[[1, 2], [3, 0]]None"),
        ("{{ range(3)|map('string')|list|tojson }}", '["0", "1", "2"]'),
        ("{{ 1700000000|string|upper }}{{ 12.346|round(2) }}", "170000000012.35"),
    ],
)
def test_what_templates_do_goes_on(text, shown):
    template = ChatTemplate(make_tokenizer(), DataOptions())
    template._frozen = text
    assert template.render([{"role": "user", "content": "q"}]) == shown


@pytest.mark.sample("[0-9]", "25", "4[5-9]")
@pytest.mark.parametrize("bomb", BOMBS, ids=map(str, range(len(BOMBS))))
def test_a_template_of_columns_is_refused_as_soon(bomb, hurried):
    row = {"messages": [{"role": "user", "content": "q"}], "width": 10**9, "eos_token": "e"}
    with pytest.raises((RowError, TrainkitError)):
        read_row(row, "template", {"completion": bomb})


def test_an_endless_template_of_columns_is_named_with_its_line(write, ready, monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.05)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    path = write([{"a": "1"}])
    source = Source(str(path), format="template", columns={"completion": endless})
    with pytest.raises(DataError, match="template of `columns` was still rendering") as caught:
        ready(source)
    assert f"{path}, line 1: data: columns" in str(caught.value)
