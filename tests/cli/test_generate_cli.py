"""generate, as a shell runs it: prompts, files, options that do nothing."""

import json
import shutil

import pytest
import torch
from typer.testing import CliRunner

from causal_qwen.cli import app, main
from causal_qwen.prompting import Speaker
from conftest import CHAT_TEMPLATE, tiny_causal, tiny_processor


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Reads and writes numbers, and has a chat template."""
    directory = tmp_path_factory.mktemp("talk") / "model"
    tiny_causal().save_pretrained(directory)
    tiny_processor(chat_template=CHAT_TEMPLATE).save_pretrained(directory)
    return directory


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "prompts.jsonl"
    prompts = [
        {"id": "a", "prompt": "It cost 12.5"},
        {"id": "b", "messages": [{"role": "user", "content": "<|end|> hi"}]},
        {"prompt": "short", "max_new_tokens": 2, "seed": 90},
        {"prompt": "another"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return file


def generate(*arguments, text=None):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=text)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_an_echoed_prompt_keeps_its_numbers(model):
    result = generate(model, "Japan 1980, 4 cylinders", "--max-new-tokens", 2)
    assert result.stdout.startswith("Japan 1980, 4 cylinders")


@pytest.mark.parametrize(
    ("prompt", "shown"), [("It is", "It is "), ("It is ", "It is "), ("It is $", "It is $")]
)
def test_a_number_stands_apart_from_the_word_before_it(tmp_path, prompt, shown):
    """Prompts are read without the white space at their end, and the number brings none."""
    model = tiny_causal()
    with torch.no_grad():
        model.action.bias[model.config.num_token_id] += 1e4
    model.save_pretrained(tmp_path)
    tiny_processor(numbers="written").save_pretrained(tmp_path)
    text = generate(tmp_path, prompt, "--max-new-tokens", 1).stdout
    assert text.startswith(shown)
    float(text.removeprefix(shown).strip())
    assert not text.removeprefix(shown).startswith(" ")


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["generate", "MODEL", ""], None, "the prompt is empty; give some text"),
        (["generate", "MODEL", "-"], "", "standard input is empty; give some text"),
        (["generate", "MODEL", "-"], "\n", "standard input is empty; give some text"),
        (["counterfactual", "MODEL", " "], None, "the prompt is empty"),
        (["counterfactual", "MODEL", "x", "--do", ""], None, "--do 1 is empty"),
        (["counterfactual", "MODEL", "x", "--observed", ""], None, "--observed is empty"),
        (["counterfactual", "MODEL", "x", "--temperature", "nan"], None, "temperature is nan"),
        (["counterfactual", "MODEL", "x" * 600], None, "600 tokens and 40 new do not fit the context of 512"),
        (["generate", "MODEL", "x" * 600], None, "600 tokens and 64 new do not fit the context of 512"),
        (["generate", "MODEL", "x", "--max-new-tokens", "513"], None, "lower max_new_tokens to 512 or less"),
        (["demo", "--prompt", ""], None, "--prompt is empty"),
        (["generate", "MODEL"], None, "give one of PROMPT and --prompts FILE"),
        (["generate", "MODEL", "x", "-o", "out.jsonl"], None, "--output is for --prompts"),
        (["generate", "MODEL", "x", "--top-p", "2"], None, "top_p is 2.0; it must be"),
        (["generate", "MODEL", "x", "--temperature", "-1"], None, "temperature is -1.0; it must be"),
        (["generate", "MODEL", "x", "--seed", str(2**64)], None, "it must be an integer from 0 to 2**64 - 1"),
        (["generate", "MODEL", "x", "-n", "2"], None, "-n 2: without sampling all 2 texts are the same"),
        (["generate", "MODEL", "x", "--seed", "1", "--individual", "f"], None, "both say who speaks"),
        (
            ["generate", "MODEL", "x", "--dtype", "int8", "--engine", "transformers"],
            None,
            "--dtype int8 needs --engine native",
        ),
        (["chat", "MODEL", "--top-p", "2"], None, "top_p is 2.0; it must be"),
    ],
)
def test_a_mistake_is_one_line(model, arguments, text, message, monkeypatch, capsys):
    import io

    arguments = [str(model) if argument == "MODEL" else argument for argument in arguments]
    monkeypatch.setattr("sys.argv", ["causal-qwen", "--quiet", *arguments])
    monkeypatch.setattr("sys.stdin", io.StringIO(text or ""))
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 1
    assert printed.out == ""
    assert message in printed.err
    said = [line for line in printed.err.splitlines() if line and "Loading" not in line]
    assert [line[:7] for line in said] == ["error: "]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--seed", "1"], "--seed has no effect: mode standard decides without sampling here"),
        (["--temperature", "0.5", "--top-p", "0.5"], "--temperature, --top-p have no effect: mode standard"),
        (["--mode", "compatible", "--sample", "--persistence", "0.5"], "mode compatible samples tokens"),
        (["--mode", "causal", "--seed", "1"], None),
    ],
)
def test_an_option_without_effect_is_noted(model, options, line):
    result = generate(model, "x", "--max-new-tokens", 1, "--json", *options)
    assert json.loads(result.stdout)
    noted = [one for one in result.stderr.splitlines() if "no effect" in one]
    assert len(noted) == (line is not None)
    assert line is None or line in noted[0]


def test_several_texts_are_of_different_individuals_and_each_can_be_repeated(model):
    arguments = [model, "Hello", "--mode", "causal", "--max-new-tokens", 6, "--json"]
    several = json.loads(generate(*arguments, "-n", 3, "--seed", 7).stdout)
    assert [one["seed"] for one in several] == [7, 8, 9]
    assert json.loads(generate(*arguments, "--seed", 9).stdout) == several[2]
    printed = generate(*arguments[:-1], "-n", 3, "--seed", 7)
    assert all(f"Hello{one['text']}" in printed.stdout for one in several)


def test_chat_answers_a_message_and_stops(model):
    arguments = [model, "hi", "--system", "be brief", "--max-new-tokens", 8]
    answer = json.loads(generate(*arguments, "--json").stdout)
    assert [turn["role"] for turn in answer["prompt"]] == ["system", "user"]
    printed = generate(*arguments, "--chat")
    assert printed.stdout == answer["text"] + "\n"
    stop = next(letter for letter in answer["text"] if not letter.isdigit())
    stopped = json.loads(generate(*arguments, "--json", "--stop", stop).stdout)
    assert stopped["text"] == answer["text"].split(stop)[0]
    assert stopped["finish_reason"] == "stop_string"


def test_a_chat_needs_a_template(tmp_path):
    tiny_causal().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    assert "no chat template" in str(generate(tmp_path, "hi", "--chat").exception)


@pytest.mark.parametrize("engine", ["transformers", "native"])
def test_a_file_of_prompts_gives_a_line_each_in_order(model, rows, engine):
    arguments = [model, "--prompts", rows, "--mode", "causal", "--seed", 3, "-n", 2, "--max-new-tokens", 6]
    result = generate(*arguments, "--engine", engine, "--batch-size", 3)
    answers = lines(result.stdout)
    assert [(one["id"], one["sample"]) for one in answers] == [
        (name, sample) for name in ("a", "b", 2, 3) for sample in (0, 1)
    ]
    assert [one["seed"] for one in answers] == [3, 4, 3, 4, 90, 91, 3, 4]
    assert answers[4]["tokens"] <= 2
    assert answers[0]["prompt"] == "It cost 12.5"
    assert {"text", "numbers", "finish_reason", "mode"} <= answers[0].keys()
    alone = generate(model, "another", "--mode", "causal", "--seed", 3, "--max-new-tokens", 6, "--json")
    assert json.loads(alone.stdout)["text"] == answers[6]["text"]


class Cut(Exception):
    """The run is killed."""


@pytest.mark.parametrize("seed", [["--seed", "3"], []])
@pytest.mark.parametrize("written", [1, 3, 4])
def test_a_run_that_was_cut_goes_on_where_it_stopped(model, rows, tmp_path, monkeypatch, seed, written):
    arguments = [model, "--prompts", rows, "--mode", "causal", "-n", 2, "--max-new-tokens", 6]
    arguments += ["--batch-size", 3, *seed]
    out = tmp_path / "out.jsonl"
    answered, asked = Speaker.answer, []

    def answer(speaker, prompts, settings, people, **options):
        if len(asked) >= (written + 2) // 3 + 1:
            raise Cut
        asked.append(len(prompts))
        return answered(speaker, prompts, settings, people, **options)

    monkeypatch.setattr(Speaker, "answer", answer)
    assert isinstance(generate(*arguments, "-o", out).exception, Cut)
    assert not out.exists()
    partial = tmp_path / "out.jsonl.partial"
    kept = partial.read_text().splitlines(keepends=True)[: written + 1]
    partial.write_text("".join(kept) + '{"id": "a", "samp')  # in the middle of a line
    monkeypatch.setattr(Speaker, "answer", answered)
    result = generate(*arguments, "-o", out)
    assert result.exit_code == 0, result.output
    assert f"continuing behind text {written} of 8" in result.stderr
    assert not partial.exists()
    own = lines(out.read_text())
    whole = generate(*arguments[: len(arguments) - len(seed)], "--seed", own[0]["seed"])
    assert lines(whole.stdout) == own


def test_another_file_of_prompts_is_not_continued(model, rows, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    arguments = [model, "--prompts", rows, "-o", out, "--max-new-tokens", 2, "--batch-size", 1]
    assert generate(*arguments).exit_code == 0
    assert "exists; choose another file" in str(generate(*arguments).exception)
    complete = out.read_text()
    again = generate(*arguments, "--overwrite", "--json")
    assert json.loads(again.stdout) == {"output": str(out), "texts": 4, "continued_from": 0, "bad_rows": 0}
    assert out.read_text() == complete
    out.rename(tmp_path / "out.jsonl.partial")
    assert "other settings" in str(generate(*arguments).exception)
    assert "texts are written as .jsonl" in str(generate(model, "--prompts", rows, "-o", "x.csv").exception)


def test_a_prompt_that_does_not_fit_is_named_before_the_first_token(model, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("short\n" + "x" * 600 + "\n")
    refused = generate(model, "--prompts", file)
    assert refused.stdout == ""
    assert "prompts.txt:2: a prompt of 600 tokens" in str(refused.exception)
    skipped = generate(model, "--prompts", file, "--on-bad-row", "skip", "--max-new-tokens", 2)
    assert len(lines(skipped.stdout)) == 1
    assert "1 prompts are skipped" in skipped.stderr


def test_options_of_files_are_noted_where_there_is_none(model):
    result = generate(model, "ab", "--max-new-tokens", 1, "--overwrite", "--on-bad-row", "skip")
    assert result.exit_code == 0
    assert "--overwrite and --on-bad-row are for --prompts" in result.stderr


def test_our_engine_runs_where_it_serves_and_json_says_which_one_ran(model, tmp_path):
    prompt = ("It cost 12.5", "--max-new-tokens", 6, "--mode", "causal", "--seed", 3, "--json")
    answers = [
        json.loads(generate(model, *prompt, *more).stdout) for more in ([], ["--engine", "transformers"])
    ]
    assert [answer.pop("engine") for answer in answers] == ["native", "transformers"]
    assert answers[0]["text"] == answers[1]["text"]
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"use_sliding_window": True}))
    left = generate(other, *prompt)
    assert json.loads(left.stdout)["engine"] == "transformers"
    assert "use_sliding_window is True" in left.stderr
    refused = generate(other, *prompt, "--engine", "native").exception
    assert "use_sliding_window is True" in str(refused)
