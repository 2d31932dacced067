"""YAML as people mean it, or an error with file and line."""

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trainkit.errors import RecipeError
from trainkit.recipe.document import parse_value, read_document


def values(write_recipe, text):
    return read_document(write_recipe(text)).values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1E5", 1e5),
        ("2e+3", 2000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("012", 12),  # octal in YAML 1.1
        ("0x1f", 31),
        ("0o17", 15),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # Numbers, booleans and dates in YAML 1.1, text in 1.2.
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2001-01-01", "2001-01-01"),
        ("0b11", "0b11"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("v1.0", "v1.0"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("[1e-5, no]", [1e-5, "no"]),
    ],
)
def test_scalars_follow_yaml_1_2(write_recipe, text, value):
    found = values(write_recipe, f"key: {text}\n")["key"]
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_has_its_line(write_recipe):
    document = read_document(
        write_recipe("# a comment\na: 1\nb:\n  c: 2\n  d:\n    - x\n    - {e: 3}\n")
    )
    assert document.lines == {
        ("a",): 2,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "d"): 5,
        ("b", "d", 0): 6,
        ("b", "d", 1): 7,
        ("b", "d", 1, "e"): 7,
    }


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "the key 'a' appears twice, first on line 1"),
        ("m:\n  a: 1\n  a: 2\n", 3, "'a' appears twice, first on line 2"),
        ("a: 1\n\tb: 2\n", 2, "not valid YAML"),
        ("a: [1,\nb: 2\n", 2, "not valid YAML"),
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("a: *.jsonl\n", 1, "alias"),
        ("a: 1\n---\nb: 2\n", 2, "single document"),
        ("a: !!python/object:os.system x\n", 1, "tag"),
        ("a: !include other.yaml\n", 1, "tag"),
        ("x: 1\n<<: {a: 1}\n", 2, "merge keys"),
        ("? [a, b]\n: 1\n", 1, "a key must be a word"),
        ("a: &a [*a]\n", 1, "contains itself"),
        ("- a\n", 1, "a recipe is a mapping of sections"),
        ("just text\n", 1, "a recipe is a mapping of sections"),
        (b"a: 1\nb: \xff\n", 2, "0xff is not UTF-8"),
    ],
)
def test_broken_files_name_the_line(write_recipe, text, line, message):
    path = write_recipe(text)
    with pytest.raises(RecipeError) as caught:
        read_document(path)
    assert caught.value.where == f"{path}:{line}"
    assert message in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_recipe_is_an_error(write_recipe, text):
    with pytest.raises(RecipeError, match="empty"):
        read_document(write_recipe(text))


def test_a_missing_file_shows_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=str(tmp_path)):
        read_document(Path("nowhere.yaml"))


def test_a_directory_is_no_recipe(tmp_path):
    with pytest.raises(RecipeError, match="a folder, where a file is meant"):
        read_document(tmp_path)


def test_a_byte_order_mark_is_skipped(write_recipe):
    document = read_document(write_recipe(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n"))
    assert document.values == {"a": 1, "b": 2}
    assert document.text.startswith("a")


def test_deep_nesting_and_alias_bombs_end_in_one_sentence(write_recipe):
    with pytest.raises(RecipeError, match="nested too deeply"):
        values(write_recipe, "[" * 20_000)
    bomb = "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n" + "".join(
        f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    with pytest.raises(RecipeError, match="more than"):
        values(write_recipe, bomb)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("null", None),
        ("*.jsonl", "*.jsonl"),
        ("a: b # c", "a: b # c"),
        (r"C:\data\a.jsonl", r"C:\data\a.jsonl"),
        ("[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("{rope: false}", {"rope": False}),
        ("'1'", "1"),
        ('""', ""),
        ("@x", "@x"),
    ],
)
def test_values_typed_on_a_command_line(text, value):
    assert parse_value(text, "override") == value


@pytest.mark.parametrize("text", ["{rope:false}", "{swiglu: true, rope:false}", "[{rope:false}]"])
def test_a_colon_without_a_blank_is_told(text):
    with pytest.raises(RecipeError, match="rope:false is one word in YAML") as caught:
        parse_value(text, "override")
    assert caught.value.fix is not None
    assert "{rope: false}" in caught.value.fix


def test_a_mapping_in_json_needs_no_blanks():
    assert parse_value('{"rope":false,"swiglu":true}', "override") == {
        "rope": False,
        "swiglu": True,
    }


SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@SETTINGS
@example("a: " + "9" * 5000)
@example("a: 1e999")
@given(st.text(alphabet="ab:-[]{}&*!#'\"|>%@`?,. \t\n0123é\x00\ufeff", max_size=40))
def test_no_text_gets_past_the_errors(write_recipe, text):
    with contextlib.suppress(RecipeError):
        document = read_document(write_recipe(text.encode("utf-8", "surrogatepass")))
        assert set(document.lines) >= {(key,) for key in document.values}


@SETTINGS
@given(st.binary(max_size=60))
def test_no_bytes_get_past_the_errors(write_recipe, content):
    with contextlib.suppress(RecipeError):
        read_document(write_recipe(content))
