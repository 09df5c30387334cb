"""Settings of generation: any numbers make a text of known tokens, or are refused by name."""

import functools
import json

import torch
from hypothesis import strategies as st

from causal_qwen.decoder import CausalLM, DecoderConfig, StopReason
from causal_qwen.generation.decisions import Decision
from fuzzing.inputs import Drawn, mostly
from fuzzing.target import Target

__all__ = ["TARGETS", "check_decision", "check_generation"]

VOCABULARY, CONTEXT = 11, 12


@functools.cache
def decoder() -> CausalLM:
    """The smallest one."""
    torch.manual_seed(0)
    fields = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DecoderConfig(
        **fields, intermediate_size=8, max_position_embeddings=CONTEXT, initializer_range=0.5
    )
    return CausalLM(config).eval()


def check_generation(data: bytes) -> None:
    """Rows begin with their prompt, hold tokens of the vocabulary, and end for a reason."""
    ids, options, stop = json.loads(data)
    prompt = torch.tensor(ids, dtype=torch.int64).reshape(1, -1)
    made = decoder().generate(prompt, generator=torch.Generator().manual_seed(0), **options, **stop)
    new = made.sequences[:, prompt.shape[1] :]
    assert torch.equal(made.sequences[:, : prompt.shape[1]], prompt)
    assert ((new >= 0) & (new < VOCABULARY)).all()
    assert 1 <= new.shape[1] <= options.get("max_new_tokens", CONTEXT)
    assert made.stop_reasons[0] in set(StopReason)


def check_decision(data: bytes) -> None:
    """A decision is made with settings that mean something."""
    decision = Decision(**json.loads(data))
    assert decision.temperature >= 0
    assert 0 < decision.level < 1


USUAL = st.floats(0.05, 1.0)
ODD = st.floats() | st.integers(-3, 12) | st.sampled_from([10**400, -(10**400), 2**70, 0, 1, 0.5, 1e-9])
NUMBER = mostly(USUAL, ODD)
COUNT = mostly(st.integers(1, 9), st.integers(-2, 14) | st.sampled_from([2**31, 2**70]))
DECIDED_BY = ("temperature", "noise_gain", "density_floor", "persistence", "level")
TOKEN = st.integers(0, VOCABULARY - 1)
TARGETS = (
    Target(
        name="settings",
        source=Drawn(
            st.tuples(
                mostly(
                    st.lists(TOKEN, min_size=1, max_size=6),
                    st.lists(TOKEN | st.sampled_from([-1, VOCABULARY, 2**40]), max_size=6),
                ),
                st.fixed_dictionaries(
                    {"max_new_tokens": st.integers(1, 4) | COUNT},
                    optional={
                        "temperature": NUMBER,
                        "top_k": st.none() | COUNT,
                        "top_p": st.none() | NUMBER,
                        "repetition_penalty": NUMBER,
                    },
                ),
                st.fixed_dictionaries({}, optional={"eos_token_id": COUNT, "pad_token_id": COUNT}),
            )
        ),
        check=check_generation,
        share=30,
    ),
    Target(
        name="decisions",
        source=Drawn(
            st.fixed_dictionaries(
                {"mode": st.sampled_from(["standard", "causal", "compatible"])},
                optional=dict.fromkeys(DECIDED_BY, NUMBER),
            )
        ),
        check=check_decision,
        share=10,
    ),
)
