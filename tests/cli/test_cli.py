"""The commands, as a shell runs them."""

import json

import pytest
from typer.testing import CliRunner

from causal_qwen.cli import app, main


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def converted(base_directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "model"
    result = invoke("convert", base_directory, out, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_token_id"] == 258
    return out


def test_parity_of_a_directory_and_of_a_source_agree(base_directory, converted):
    results = [
        json.loads(invoke("parity", target, "--json").stdout) for target in (converted, base_directory)
    ]
    assert results[0] == results[1]
    assert results[0]["max_abs_logit_diff"] == 0.0
    assert results[0]["argmax_agreement"] == 1.0
    assert {
        "max_abs_logit_diff", "argmax_agreement", "ovr_prob_sum_median", "ovr_loss", "softmax_nll",
        "added_parameters_fraction", "positions",
    } <= set(results[0])  # fmt: skip


def test_parity_takes_a_text_and_prints_a_table(base_directory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A plain sentence about nothing in particular. " * 5)
    result = invoke("parity", base_directory, "--text", text, "--calibration", "none")
    assert result.exit_code == 0
    assert "max_abs_logit_diff" in result.stdout


def test_info_describes_a_converted_model(base_directory, converted):
    facts = json.loads(invoke("info", converted, "--json").stdout)
    assert facts["architecture"]["vocab_size (V)"] == 300
    assert facts["numbers"]["num_token_id"] == 258
    assert facts["calibration"]["mode"] == "default"
    assert facts["parameters"]["causal heads"] > 0
    assert facts["provenance"]["converted from"] == str(base_directory)
    assert facts["provenance"]["reports"] == "conversion.json"
    assert facts["precision"] == {"backbone": "float32", "causal heads": "float32"}
    assert facts["intervals"]["calibrated"] is False
    gamma, half = facts["law"]["gamma (γ)"], facts["calibration"]["gamma"] / 2
    assert gamma["value"] == pytest.approx(half), "as it is in the weights; b_noise is the other half"
    assert "how unsure the model is" in gamma["meaning"]
    table = " ".join(invoke("info", converted).stdout.split())
    assert "how far sampling moves the cause" in table
    assert "num_token_id 258" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "./nowhere", "out"], "./nowhere: no such directory"),
        (["info", "./nowhere"], "./nowhere: no such directory"),
        (["parity", "absent.gguf"], "absent.gguf: no such file"),
        (["convert", "smollm2", "out", "--calibration-text", "absent.txt"], "absent.txt"),
    ],
)
def test_mistakes_get_one_line_and_a_failing_exit(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["causal-qwen", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code not in (0, None)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_info_of_a_plain_checkpoint_says_what_to_do(base_directory):
    facts = json.loads(invoke("info", base_directory, "--json").stdout)
    assert facts["provenance"]["kind"] == "a base, not converted yet"
    assert facts["provenance"]["next"] == f"causal-qwen convert {base_directory} OUT"
    assert facts["precision"]["weights"] == "float32"
    assert facts["tokenizer"] == {"tokens": 258, "chat template": False}
    assert "law" not in facts


def test_an_existing_output_is_refused_and_kept(base_directory, converted):
    result = invoke("convert", base_directory, converted)
    assert result.exit_code != 0
    assert "exists" in str(result.exception)


def test_numbers_shows_what_is_read():
    result = json.loads(invoke("numbers", "价格是99.9元, A4, -5e3", "--json").stdout)
    assert result == {
        "numbers": [
            {"text": "99.9", "value": 99.9, "start": 3, "end": 7},
            {"text": "-5e3", "value": -5000.0, "start": 14, "end": 18},
        ]
    }
    assert "99.9" in invoke("numbers", "价格是99.9元").stdout
    assert "no numbers" in invoke("numbers", "none").stdout


@pytest.mark.parametrize("mode", ["standard", "causal", "compatible"])
def test_generate_prints_text_and_who_said_it(converted, mode):
    arguments = ["generate", converted, "Hello", "--mode", mode, "--sample", "--max-new-tokens", "5"]
    first = json.loads(invoke(*arguments, "--json").stdout)
    assert first["mode"] == mode
    again = json.loads(invoke(*arguments, "--json", "--seed", first["seed"]).stdout)
    assert again == first
    streamed = invoke(*arguments, "--seed", first["seed"])
    assert streamed.exit_code == 0
    assert first["text"].strip() in streamed.stdout


def test_generate_takes_a_saved_individual(converted, tmp_path):
    from causal_qwen import Individual

    Individual(5).save(tmp_path / "five.json")
    arguments = ["generate", converted, "Hello", "--mode", "causal", "--max-new-tokens", "5", "--json"]
    by_file = json.loads(invoke(*arguments, "--individual", tmp_path / "five.json").stdout)
    assert by_file == json.loads(invoke(*arguments, "--seed", 5).stdout)


def test_chat_keeps_a_conversation(converted, tmp_path):
    import shutil

    model = tmp_path / "chatty"
    shutil.copytree(converted, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    lines = "hi\n/mode standard\nagain\n/individual 7\n/mode causal\nonce more\n/reset\n/nonsense\n/quit\n"
    result = CliRunner().invoke(
        app, ["chat", str(model), "--max-new-tokens", "3", "--seed", "3"], input=lines
    )
    assert result.exit_code == 0, result.output
    assert "seed 3" in result.stderr
    assert "seed 7" in result.stderr
    assert "a new conversation" in result.stderr
    refused = invoke("chat", converted)
    assert "no chat template" in str(refused.exception)


def test_version():
    from causal_qwen import __version__

    assert invoke("--version").stdout.strip() == __version__


@pytest.mark.parametrize("place", [0, 1, 2])
def test_quiet_is_understood_anywhere(base_directory, monkeypatch, capsys, place):
    arguments = ["parity", str(base_directory)]
    arguments.insert(place, "--quiet")
    monkeypatch.setattr("sys.argv", ["causal-qwen", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert end.value.code == 0
    assert "max_abs_logit_diff" in printed.out
    assert "measuring" not in printed.err


def test_text_after_two_dashes_is_never_a_flag(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["causal-qwen", "numbers", "--", "--quiet"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "--quiet" in capsys.readouterr().out


def test_debug_shows_where_an_error_came_from(monkeypatch):
    monkeypatch.setattr("sys.argv", ["causal-qwen", "info", "nowhere", "--debug"])
    with pytest.raises(ValueError, match="nowhere"):
        main()


def test_numbers_of_standard_input():
    result = CliRunner().invoke(app, ["numbers", "-", "--json"], input=b"\xef\xbb\xbf5 apples")
    assert json.loads(result.stdout)["numbers"][0]["start"] == 0
    result = CliRunner().invoke(app, ["numbers", "-"], input=b"caf\xe9")
    assert "standard input: byte 0xe9 at offset 3 is not utf-8" in str(result.exception)
