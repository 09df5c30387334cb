"""What rows say: examples with completions, prompts without, and the recipe that a model carries."""

import pytest

from causal_qwen.data import BadRow, BadRows, Reading
from causal_qwen.training import TrainingRecipe

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_shapes_of_examples():
    rows = [{"text": "all"}, {"prompt": "p", "completion": "c"}, {"messages": CHAT}]
    examples = list(Reading().examples(rows, BadRows()))
    assert [(one.prompt, one.completion) for one in examples] == [("", "all"), ("p", "c"), ("", "")]
    assert list(examples[2].messages) == CHAT


@pytest.mark.parametrize(
    ("completion", "text", "values"),
    [
        (2721.6018972544634, "2721.6018972544634", [2721.6018972544634]),
        (" 2721.6018972544634\n", " 2721.6018972544634\n", [2721.6018972544634]),
        (5, "5", [5.0]),
        ("007", "007", []),
        ("5 kg", "5 kg", []),  # for the scanner to read
        ("1e999", "1e999", []),
    ],
)
def test_a_completion_that_is_a_number_is_known_to_be_one(completion, text, values):
    (one,) = Reading().examples([{"prompt": "p", "completion": completion}], BadRows())
    assert (one.completion, [number.value for number in one.completion_numbers]) == (text, values)
    assert all(text[number.start : number.end] == number.text for number in one.completion_numbers)


def test_shapes_of_prompts():
    rows = [{"text": "all"}, {"prompt": "p", "completion": "c"}, {"messages": CHAT}, {"messages": CHAT[:1]}]
    prompts = list(Reading().prompts(rows, BadRows()))
    assert [one.prompt for one in prompts] == ["all", "p", "", ""]
    assert [one.messages for one in prompts] == [None, None, (CHAT[0],), (CHAT[0],)]
    assert all(one.completion == "" for one in prompts)
    reading = Reading("{name} costs {price}.", "price")
    assert [one.prompt for one in reading.prompts([{"name": "fig"}], BadRows())] == ["fig costs "]


@pytest.mark.parametrize(
    ("row", "example", "prompt"),
    [
        ({"a": 1}, "neither text, nor prompt", "neither prompt, text nor messages"),
        ({"text": ""}, "text is empty", "text is empty"),
        ({"text": 3, "prompt": 3}, "text is 3, not a text", "prompt is 3, not a text"),
        ({"messages": "hello"}, "not a list of messages", "not a list of messages"),
        ({"messages": [{"role": "user"}]}, "needs role and content", "needs role and content"),
        ({"messages": CHAT[:1]}, "nothing to learn", None),
        ({"prompt": "p", "completion": " "}, "completion is empty", None),
        ({"prompt": "p", "completion": [3]}, "neither a text nor a number", None),
        ({"prompt": "p", "completion": float("inf")}, "completion is inf", None),
        ({"messages": CHAT[1:]}, None, "nothing to answer"),
    ],
)
def test_rows_that_say_nothing_are_bad(row, example, prompt):
    for read, reason in ((Reading().examples, example), (Reading().prompts, prompt)):
        if reason is None:
            assert len(list(read([row], BadRows()))) == 1
            continue
        with pytest.raises(BadRow, match=f"row 0: .*{reason}"):
            list(read([row], BadRows()))
        bad_rows = BadRows("skip")
        assert list(read([row], bad_rows)) == []
        assert bad_rows.count == 1


def test_impossible_readings_are_refused_before_any_row_is_read():
    with pytest.raises(ValueError, match="there is no template"):
        Reading(target="price")
    with pytest.raises(ValueError, match=r"begins with \{price\}"):
        Reading("{price} for {name}", "price").prompts([], BadRows("skip"))
    with pytest.raises(ValueError, match="no field 'price'"):
        Reading("{name}", "price").examples([], BadRows("skip"))


def test_a_trained_model_says_how_its_rows_are_read(tmp_path):
    assert Reading.of(tmp_path) == Reading()
    recipe = TrainingRecipe(
        output="o", template="{a} {b} {c}", target="b", completion_only=False, append_eos=False
    )
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    trained = Reading.of(tmp_path)
    assert trained == Reading("{a} {b} {c}", "b", completion_only=False, append_eos=False)
    assert Reading.of(tmp_path, target="c").target == "c"
    other = Reading.of(tmp_path, template="{a} {d}")
    assert (other.template, other.target, other.append_eos) == ("{a} {d}", None, False)


SENTENCES = ["{name} costs {price}.", "The price of {name} is {price}", "{name}: {price}"]


def test_of_several_templates_each_row_has_one_whenever_it_is_read():
    rows = [{"name": f"fig {index}", "price": index} for index in range(60)]
    reading = Reading(SENTENCES, "price", template_seed=5)
    texts = [one.prompt + one.completion for one in reading.examples(rows, BadRows())]
    wordings = [
        SENTENCES.index(next(s for s in SENTENCES if s.format(**row) == text))
        for row, text in zip(rows, texts, strict=True)
    ]
    assert set(wordings) == {0, 1, 2}
    assert min(map(wordings.count, range(3))) >= 10
    again = [one.prompt + one.completion for one in reading.examples(rows[:7], BadRows())]
    assert again == texts[:7]
    other = Reading(SENTENCES, "price", template_seed=6).examples(rows, BadRows())
    assert [one.prompt + one.completion for one in other] != texts


def test_predictions_and_evaluations_take_the_first_template():
    reading = Reading(SENTENCES, "price")
    rows = [{"name": f"fig {index}", "price": index} for index in range(20)]
    assert [one.prompt for one in reading.prompts(rows, BadRows())] == [
        f"fig {index} costs " for index in range(20)
    ]
    assert [one.completion for one in reading.examples(rows, BadRows())] == [
        f"{index}." for index in range(20)
    ]
    drawn = Reading(SENTENCES, "price", template_seed=5)
    assert list(drawn.prompts(rows, BadRows())) == list(reading.prompts(rows, BadRows()))


def test_a_trained_model_brings_all_its_templates(tmp_path):
    recipe = TrainingRecipe(output="o", template=SENTENCES, target="price", seed=3)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert Reading.of(tmp_path) == Reading(SENTENCES, "price") == Reading(tuple(SENTENCES), "price")
    assert Reading.of(tmp_path).templates == tuple(SENTENCES)
    assert Reading.of(tmp_path, template="{a} {b}", target="b").templates == ("{a} {b}",)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{name} is dear", r"template 2 of 3 \('{name} is dear'\): the template has no field 'price'"),
        ("no field", r"template 2 of 3 \('no field'\): .* needs fields by name"),
        ("{name", r"template 2 of 3 \('{name'\): .* cannot be read"),
    ],
)
def test_the_template_that_cannot_be_used_is_named(wrong, message):
    reading = Reading([SENTENCES[0], wrong, SENTENCES[2]], "price")
    for read in (reading.examples, reading.prompts):
        with pytest.raises(ValueError, match=message):
            read([], BadRows("skip"))


@pytest.mark.parametrize("template", [5, [], (), [5], ["{a}", None], {"{a}": 1}], ids=repr)
def test_templates_are_texts(template):
    with pytest.raises(ValueError, match=r"template is .*; it must be a str, or a list of them"):
        Reading(template)
