"""What people do with a Qwen2 in transformers, done with the same model converted."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)

from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, CausalQwen2Processor, convert
from causal_qwen.conversion import Base
from conftest import TEXT, tiny_base, tiny_source, tiny_tokenizer
from number_speakers import number_processor, number_speaker

NEW = 8
MODES = ["compatible", "standard"]
TOOL = {"type": "function", "function": {"name": "weigh", "parameters": {"type": "object"}}}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def base():
    """Without a spare row, so that <NUM> makes the vocabulary one row longer."""
    return tiny_source(rows=258, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def model(base):
    return convert(base, calibration_text=TEXT).model


@pytest.fixture(scope="module")
def assistant():
    return tiny_base(vocab_size=258, num_hidden_layers=1)


@pytest.fixture(scope="module")
def places(base, model, tmp_path_factory):
    """Directories of the base, of the model, and of a model that writes numbers."""
    place = tmp_path_factory.mktemp("habits")
    base.model.save_pretrained(place / "base")
    base.tokenizer.save_pretrained(place / "base")
    convert(base, place / "model", calibration_text=TEXT)
    number_speaker().save_pretrained(place / "speaker")
    number_processor().save_pretrained(place / "speaker")
    return place


def agree(base, model, mode, *args, make=dict, **options):
    """Whether both generate the same; ``make`` gives what must be new for each call."""
    torch.manual_seed(0)
    expected = base.model.generate(*args, **options, **make())
    torch.manual_seed(0)
    actual = model.generate(*args, **options, **make(), inference_mode=mode)
    return torch.equal(actual, expected)


# --- assistants
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "converted"])
def test_an_assistant_helps_as_it_helps_qwen2(base, model, assistant, ids, kind, do_sample):
    options = {"max_new_tokens": 12, "do_sample": do_sample}
    helper = assistant
    if kind == "converted":
        helper = convert(Base("assistant", assistant, tiny_tokenizer()), calibration="none").model
    torch.manual_seed(0)
    expected = base.model.generate(ids[:1], **options, assistant_model=assistant)
    torch.manual_seed(0)
    actual = model.generate(ids[:1], **options, assistant_model=helper, inference_mode="compatible")
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "assistant_early_exit"])
def test_a_model_that_helps_itself(base, model, ids, option):
    assert agree(base, model, "compatible", ids[:1], **GREEDY, **{option: 1})


@pytest.mark.parametrize("mode", ["standard", "causal"])
def test_assistants_need_probabilities(model, assistant, ids, mode):
    with pytest.raises(ValueError, match=f"inference_mode='{mode}' does not have; use .*='compatible'"):
        model.generate(ids[:1], assistant_model=assistant, inference_mode=mode)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {}, "assistant"])
def test_a_plain_bool_ends_transformers_own_loops(base, model, assistant, ids, options):
    options = {"assistant_model": assistant} if options == "assistant" else options
    stop = [lambda input_ids, scores, **_: input_ids.shape[1] >= 15]
    assert agree(base, model, "compatible", ids[:1], **GREEDY, **options, stopping_criteria=stop)


# --- embeddings
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"use_cache": False}, {"eos_token_id": list(range(0, 250, 3))}], ids=str
)
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_embeddings_are_read_as_qwen2_reads_them(base, model, ids, mode, with_ids, options):
    given = {"inputs_embeds": base.model.get_input_embeddings()(ids)}
    given |= {"input_ids": ids} if with_ids else {}
    assert agree(base, model, mode, **given, **GREEDY, **options)


@pytest.mark.parametrize("use_cache", [True, False])
def test_embeddings_in_causal_mode(model, ids, use_cache):
    options = {"inference_mode": "causal", "individual": 3, "max_new_tokens": NEW}
    embeds = model.get_input_embeddings()(ids)
    said = model.generate(inputs_embeds=embeds, use_cache=use_cache, **options)
    assert torch.equal(said, model.generate(ids, **options)[:, ids.shape[1] :])


def test_numbers_follow_embeddings():
    model, processor = number_speaker(), number_processor()
    batch = processor("It cost 12.5 or", return_tensors="pt")
    options = {"max_new_tokens": 4, "pad_token_id": 0, "return_dict_in_generate": True}
    embeds = model.embed(batch["input_ids"], batch["numeric_values"])
    said = model.generate(inputs_embeds=embeds, **options)
    expected = model.generate(**batch, **options).after(batch["input_ids"].shape[1])
    assert torch.equal(said.sequences, expected.sequences)
    torch.testing.assert_close(said.numeric_values, expected.numeric_values)


# --- everyday calls
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 16, "do_sample": False},
        GREEDY | {"min_new_tokens": 5, "eos_token_id": [30, 31, 32, 200]},
        GREEDY | {"bad_words_ids": [[65], [30]]},
        GREEDY | {"sequence_bias": [[[30], 5.0]]},
        GREEDY | {"renormalize_logits": True},
        GREEDY | {"prefill_chunk_size": 4},
        GREEDY | {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20, 60))},
        GREEDY | {"logits_processor": [lambda ids, scores: scores + torch.arange(scores.shape[-1]) * 1e-3]},
        {"generation_config": GenerationConfig(**GREEDY, pad_token_id=0)},
    ],
    ids=lambda options: next((name for name in options if name not in GREEDY), "greedy"),
)
def test_everyday_options(base, model, ids, mode, options):
    assert agree(base, model, mode, ids, **options)


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_is_passed_in_serves_the_next_turn(base, model, ids, mode):
    def turns(model, **options):
        cache = DynamicCache()
        first = model.generate(ids[:1], **GREEDY, **options, past_key_values=cache)
        longer = torch.cat([first, ids[1:2]], dim=1)
        return model.generate(longer, **GREEDY, **options, past_key_values=cache)

    assert torch.equal(turns(model, inference_mode=mode), turns(base.model))


def test_scores_and_transition_scores_are_qwen2s(base, model, ids):
    options = GREEDY | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = base.model.generate(ids, **options)
    actual = model.generate(ids, **options, inference_mode="compatible")
    for name in ("scores", "logits"):
        assert all(map(torch.equal, getattr(actual, name), getattr(expected, name)))
    arguments = [(out.sequences, out.scores) for out in (actual, expected)]
    torch.testing.assert_close(
        model.compute_transition_scores(*arguments[0], normalize_logits=True),
        base.model.compute_transition_scores(*arguments[1], normalize_logits=True),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(places, ids, dtype):
    base, model = (
        AutoModelForCausalLM.from_pretrained(places / name).to(dtype) for name in ("base", "model")
    )
    assert torch.equal(
        model.generate(ids, **GREEDY, inference_mode="compatible"), base.generate(ids, **GREEDY)
    )


@pytest.mark.parametrize("options", [{"device_map": "auto"}, {"attn_implementation": "eager"}], ids=str)
def test_ways_to_load(places, ids, options):
    base, model = (
        AutoModelForCausalLM.from_pretrained(places / name, **options) for name in ("base", "model")
    )
    with torch.no_grad():
        assert torch.equal(model(ids).logits[..., :258], base(ids).logits)


# --- directories
# ---------------------------------------------------------------------------------------------------------


def test_auto_classes_know_a_converted_directory(places, tmp_path):
    place = places / "model"
    assert type(AutoConfig.from_pretrained(place)) is CausalQwen2Config
    assert type(AutoModelForCausalLM.from_pretrained(place)) is CausalQwen2ForCausalLM
    processor, tokenizer = AutoProcessor.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert type(processor) is CausalQwen2Processor
    assert AutoConfig.from_pretrained(place).number_spelling == processor.spelling
    assert processor.spelling["7"] == tokenizer.convert_tokens_to_ids("7")
    assert [processor.padding_side, tokenizer.padding_side] == ["left", "left"]
    rows = processor(["a", "abc"], padding=True)["input_ids"]
    assert rows[0][:2] == [processor.pad_token_id] * 2
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    assert type(model) is CausalQwen2ForCausalLM
    model.save_pretrained(tmp_path)
    saved = sorted(file.name for file in tmp_path.iterdir())
    assert saved == ["causal_qwen_auto.py", "config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("who", ["nobody", "processor"])
def test_a_pipeline_writes_digits(places, who):
    model = AutoModelForCausalLM.from_pretrained(places / "speaker")
    processor = AutoProcessor.from_pretrained(places / "speaker")
    options = {"max_new_tokens": 6, "do_sample": False}
    given = {} if who == "nobody" else {"tokenizer": processor}
    generate = pipeline("text-generation", model=str(places / "speaker"), **given)
    for prompt in ("It cost 12.5 or", "Two"):
        text = generate(prompt, **options)[0]["generated_text"]
        batch = processor(prompt, return_tensors="pt", numbers="text" if who == "nobody" else "value")
        assert text == processor.batch_decode(model.generate(**batch, **options), skip_special_tokens=True)[0]
        assert sum(character.isdigit() for character in text[len(prompt) :]) > 6
    chat = [{"role": "user", "content": "It cost 12.5 or"}]
    answer = generate(chat, **options)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    assert any(character.isdigit() for character in answer["content"])


def test_chats_become_batches(places):
    processor = AutoProcessor.from_pretrained(places / "speaker")
    tokenizer = processor.tokenizer
    chats = [
        [{"role": "user", "content": "It cost 12.5"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so 0 and 7"}],
    ]
    wanted = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"tools": [TOOL]}):
        batch = processor.apply_chat_template(chats, **wanted, padding=True, **options)
        assert [tuple(batch[name].shape) for name in batch] == [batch["input_ids"].shape] * 3
        is_number = batch["input_ids"] == processor.num_token_id
        assert batch["numeric_values"][is_number].tolist() == [12.5, 0.0, 7.0]
        assert not batch["numeric_values"][~is_number].any()
        texts = tokenizer.apply_chat_template(chats, tokenize=False, **options)
        assert processor.apply_chat_template(chats, **options) == texts
        as_text = processor.apply_chat_template(chats, **wanted, padding=True, numbers="text", **options)
        expected = tokenizer.apply_chat_template(chats, **wanted, padding=True, **options)
        assert torch.equal(as_text["input_ids"], expected["input_ids"])
        assert torch.equal(as_text["attention_mask"], expected["attention_mask"])
    one = processor.apply_chat_template(chats[0], **wanted)
    assert one["input_ids"].shape[0] == 1
    assert (
        processor.apply_chat_template(chats[0], tokenize=True, return_dict=False)
        == one["input_ids"].tolist()[0]
    )


def test_text_can_be_iterated(base, model, ids):
    streamer = TextIteratorStreamer(base.tokenizer, skip_prompt=True)
    said = model.generate(ids[:1], **GREEDY, streamer=streamer)
    assert "".join(streamer) == base.tokenizer.decode(said[0, ids.shape[1] :])


def test_stop_strings_take_a_processor_for_a_tokenizer():
    model, processor = number_speaker(), number_processor()
    batch = processor("It cost 12.5 or", return_tensors="pt")
    options = {"max_new_tokens": 4, "pad_token_id": 0, "stop_strings": ["zz"]}
    ids = model.generate(**batch, **options, tokenizer=processor)
    assert torch.equal(ids, model.generate(**batch, **options, tokenizer=processor.tokenizer))


def test_several_answers_begin_with_the_numbers_of_their_prompts():
    model, processor = number_speaker(), number_processor()
    batch = processor(["It cost 12.5 or", "0 and"], padding=True, return_tensors="pt")
    options = {"max_new_tokens": 3, "pad_token_id": 257, "num_return_sequences": 2, "do_sample": True}
    texts = processor.batch_decode(model.generate(**batch, **options), skip_special_tokens=True)
    assert [text[:5] for text in texts] == ["It co", "It co", "0 and", "0 and"]
    assert texts[1].startswith("It cost 12.5 or")
