"""Ollama's template: read off trained ones, and written as Go renders it."""

import json
import shutil
import subprocess

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainkit.errors import ModelError
from trainkit.export.ollama import wrapping_of

CHATML = (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nBe {{ '{{' }} kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LLAMA3 = (
    "<s>{% for m in messages %}<|h|>{{ m.role }}<|/h|>\n\n{{ m.content }}<|eot|>{% endfor %}"
    "<|h|>assistant<|/h|>\n\n"
)
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}<|assistant|>\n"
SYSTEM_IN_USER = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]"
    "{% if loop.first %}{{ s }}{% endif %}{{ m.content }}[/]{% endfor %}[assistant]"
)
SHRINKING = "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}"
GO = """\
package main

import ("bytes"; "encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }

func main() {
	text, _ := os.ReadFile("t")
	raw, _ := os.ReadFile("chats.json")
	var chats [][]Message
	json.Unmarshal(raw, &chats)
	parsed := template.Must(template.New("").Parse(string(text)))
	var out []string
	for _, chat := range chats {
		var one bytes.Buffer
		if err := parsed.Execute(&one, map[string]any{"Messages": chat}); err != nil { panic(err) }
		out = append(out, one.String())
	}
	json.NewEncoder(os.Stdout).Encode(out)
}
"""
CHATS = [
    [("user", "a")],
    [("user", "a"), ("assistant", "b"), ("user", "c")],
    [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c {{ .X }}")],
]


def renderer(template):
    compiled = ImmutableSandboxedEnvironment().from_string(template)
    return lambda messages: compiled.render(messages=messages)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GLM], ids=["chatml", "llama3", "glm"])
def test_a_template_that_wraps_messages_is_read_off(template):
    render = renderer(template)
    wrapping = wrapping_of(render, bos="<s>" if template is LLAMA3 else "")
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        assert wrapping.render(chat) == render(messages).removeprefix("<s>")


def test_another_kind_of_template_is_refused_or_seen_to_differ():
    with pytest.raises(ModelError, match="cannot be written for Ollama"):
        wrapping_of(renderer(SHRINKING), bos="")
    render = renderer(SYSTEM_IN_USER)
    chat = [("system", "s"), ("user", "a")]
    messages = [{"role": role, "content": content} for role, content in chat]
    assert wrapping_of(render, bos="").render(chat) != render(messages), "the certificate says so"


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
@pytest.mark.parametrize("template", [CHATML, LLAMA3, GLM], ids=["chatml", "llama3", "glm"])
def test_go_itself_renders_the_same(template, tmp_path):
    """Ollama's engine is Go's text/template: where Go is installed, it is asked."""
    wrapping = wrapping_of(renderer(template), bos="")
    (tmp_path / "main.go").write_text(GO)
    (tmp_path / "t").write_text(wrapping.text())
    chats = [[{"Role": role, "Content": content} for role, content in chat] for chat in CHATS]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    done = subprocess.run(["go", "run", "main.go"], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout) == [wrapping.render(chat) for chat in CHATS]
