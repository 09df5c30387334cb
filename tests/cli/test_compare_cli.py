"""causal-qwen compare: JSON, files, and refusals in one line."""

import json

import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app
from conftest import tiny_base, tiny_tokenizer

KEYS = {
    "difference", "lower", "upper", "correlation", "variance_ratio", "samples_saved", "pairs",
    "variance_ratio_lower", "variance_ratio_upper", "correlation_lower", "correlation_upper", "scores",
}  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory, conversion, one_thread):
    """A converted model, and one of transformers that is not ours."""
    place = tmp_path_factory.mktemp("compare")
    conversion.model.save_pretrained(place / "ours")
    conversion.processor.save_pretrained(place / "ours")
    tiny_base("llama").save_pretrained(place / "other")
    tiny_tokenizer().save_pretrained(place / "other")
    (place / "prompts.jsonl").write_text(
        '{"prompt": "Hello", "answer": 4}\n{"prompt": "The weather", "answer": 5}\n', encoding="utf-8"
    )
    (place / "others.txt").write_text("Hi\nThe climate\n", encoding="utf-8")
    return place


@pytest.fixture
def run(directories):
    def run(*words):
        words = [str(directories / word) if word in ("ours", "other") else str(word) for word in words]
        result = CliRunner().invoke(app, ["compare", *words, "--max-new-tokens", "4"])
        return result

    return run


def test_json_has_the_figures(run, directories, tmp_path):
    pairs, page = tmp_path / "pairs.jsonl", tmp_path / "page.html"
    result = run(
        "ours", "--prompts", directories / "prompts.jsonl", "--against-prompts", directories / "others.txt",
        "-n", 4, "--score", "length", "--score", "nats", "--score", "numeric:answer", "--json",
        "--output", pairs, "--report", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert set(figures) >= KEYS
    assert (figures["pairs"], figures["coupling"]) == (8, "individual")
    assert set(figures["scores"]) == {"length", "nats", "numeric:answer"}
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    assert len(lines) == 8
    assert lines[0]["b"]["prompt"] == "Hi"
    assert page.is_file()
    again = run("ours", "--prompts", directories / "prompts.jsonl", "-n", 4, "--output", pairs)
    assert isinstance(again.exception, FileExistsError)


def test_precisions_settings_and_other_models(run, directories):
    prompts = ("--prompts", directories / "prompts.jsonl", "-n", 3)
    same = run("ours", *prompts, "--json")
    assert json.loads(same.stdout)["variance_ratio"] in (0.0, None)
    colder = run("ours", *prompts, "--against-temperature", 0.1, "--against-persistence", 0.9)
    assert "A: ours   B: ours, temperature 0.1, persistence 0.9" in colder.stdout
    assert "6 of 6 pairs, coupling individual; all pairs were made" in colder.stdout
    foreign = run("ours", "other", *prompts, "--json")
    assert json.loads(foreign.stdout)["coupling"] == "gumbel"
    eight = run("ours", "--prompt", "Hello", "-n", 3, "--against-dtype", "int8", "--json")
    assert json.loads(eight.stdout)["b"].endswith("int8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "3"], "give one of --prompts FILE, or --prompt TEXT"),
        (["--prompt", "a", "--against-prompt", "b", "--against-prompt", "c"], "1 prompts against 2"),
        (["--prompt", "a", "--score", "nonsense"], "score 'nonsense' is unknown"),
        (["--prompt", "a", "--output", "pairs.csv"], "pairs are written as .jsonl"),
        (["--prompt", "a", "--report", "page.pdf"], "a report is .html"),
        (["--prompt", "a", "--sequential", "-n", "5"], "too few to look"),
        (["--prompt", " "], "a prompt is empty"),
        (["--prompt", "a", "--processes", "2"], "needs --engine vllm and --output"),
        (
            ["--prompt", "a", "--engine", "vllm", "--processes", "2", "--sequential", "--output", "p.jsonl"],
            "--sequential looks at the pairs as they come",
        ),
        (["--prompt", "a", "--engine", "vllm", "--dtype", "int8"], "--dtype int8 needs --engine native"),
    ],
)
def test_refusals_name_the_remedy(run, words, message):
    result = run("ours", *words)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_more_than_two_are_ranked(run, directories):
    prompts = ("--prompts", directories / "prompts.jsonl", "-n", 3, "--coupling", "gumbel", "--json")
    figures = json.loads(run("ours", "other", "ours", *prompts).stdout)
    assert len(figures["others"]) == 1
    assert set(figures["ranking"]["by_mean"]) == {"ours", "other"}
    refused = run("ours", "other", "ours", "--prompt", "a", "--sequential")
    assert "--sequential is for two sides" in str(refused.exception)


def test_models_of_one_name_are_told_apart(run, directories):
    """Checkpoints of two runs are often called alike."""
    for name in ("one", "two"):
        (directories / name).mkdir(exist_ok=True)
        (directories / name / "final").unlink(missing_ok=True)
        (directories / name / "final").symlink_to(directories / "ours")
    finals = [str(directories / name / "final") for name in ("one", "two")]
    result = run("ours", *finals, "--prompt", "Hello", "-n", 3, "--coupling", "independent", "--json")
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.stdout)["ranking"]["by_mean"]) == {str(directories / "ours"), *finals}
    alike = run("ours", "--prompt", "Hello", "-n", 3, "--coupling", "independent")
    assert "will be 0" not in alike.output


def test_settings_of_a_single_prompt_are_refused(run, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a", "temperature": 0.5}\n', encoding="utf-8")
    result = run("ours", "--prompts", file)
    assert "one for each side" in str(result.exception)


def test_noise_is_made_equal_and_told(run, directories):
    words = ["ours", "--prompts", directories / "prompts.jsonl", "-n", 4, "--noise", "equal", "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["b"] == "ours, temperature 1"
    assert figures["difference"] == 0
    refused = run(*words, "--against-temperature", 2)
    assert "--noise equal sets the other side's temperature" in str(refused.exception)
