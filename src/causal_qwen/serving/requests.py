"""What clients may ask for, field by field; anything else is refused. It knows no model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from causal_qwen.individual import SEEDS

__all__ = [
    "ChatRequest",
    "CompareRequest",
    "CompletionRequest",
    "CounterfactualRequest",
    "Generation",
    "Message",
    "PredictRequest",
    "Sampling",
    "Side",
    "Who",
]

MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_TOP = 16, 16, 16, 20
MOST_ROWS, MOST_INTERVENTIONS, MOST_PAIRS = 256, 15, 256

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Share = Annotated[float, Field(ge=0, le=1)]
Level = Annotated[float, Field(gt=0, lt=1)]
Words = Annotated[str, Field(min_length=1)]
# What is accepted only where it asks for nothing.
Nothing = Annotated[float, Field(ge=0, le=0)] | None
NoText = Annotated[str, Field(max_length=0)] | None
NoList = Annotated[list[Any], Field(max_length=0)] | None


class Strict(BaseModel):
    """Known fields of the right types, and finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Who(Strict):
    """An individual, as `Individual.to_json` writes it."""

    seed: Seed
    persistence: Share | None = None
    start: Annotated[int, Field(ge=0, lt=2**48)] = 0
    path: str | None = None
    path_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Who:
        if (self.path is None) != (self.path_shape is None):
            raise ValueError("path and path_shape belong together")
        return self


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        parts = self.content if isinstance(self.content, str) else "".join(one.text for one in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": parts}


Messages = Annotated[list[Message], Field(min_length=1)]


class Sampling(Strict):
    """What decides a text beside its prompt; what is left out is the model's."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    persistence: Share | None = None
    density_floor: Annotated[float, Field(ge=0, lt=1)] | None = None
    noise_gain: Annotated[float, Field(ge=0, le=1e6)] | None = None
    stop: Words | Annotated[list[Words], Field(max_length=MOST_STOPS)] | None = None


class Seeded(Sampling):
    """With who speaks, and the interval of numbers."""

    seed: Seed | None = None
    individual: Seed | Who | None = None
    interval_level: Level = 0.9
    raw_intervals: bool = False

    @model_validator(mode="after")
    def _one_individual(self) -> Seeded:
        if self.seed is not None and self.individual is not None:
            raise ValueError("seed and individual both say who speaks; give one of them")
        return self


class ResponseFormat(Strict):
    """The form of the text."""

    type: Literal["text", "json_object"]


class StreamOptions(Strict):
    """What a stream has beside texts."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Seeded):
    """What completions and chats share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    inference_mode: Literal["causal", "standard", "compatible"] | None = None
    sample: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # of no effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    # only where they ask for nothing
    presence_penalty: Nothing = None
    frequency_penalty: Nothing = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream: true")
        return self


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Words | Annotated[list[Words], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: NoText = None


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: NoList = None
    functions: NoList = None

    @model_validator(mode="after")
    def _tops(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are the same; give one of them")
        return self


class PredictRequest(Strict):
    """POST /v1/predict."""

    model: str | None = None
    rows: Annotated[
        list[dict[str, str | float | int | bool | None]], Field(min_length=1, max_length=MOST_ROWS)
    ]
    template: str | None = None
    target: str | None = None
    interval_level: Level = 0.9
    raw_intervals: bool = False


Prompt = Words | Messages


class CounterfactualRequest(Seeded):
    """POST /v1/counterfactual."""

    model: str | None = None
    prompt: Prompt
    interventions: Annotated[list[Prompt], Field(max_length=MOST_INTERVENTIONS)] = []
    control: Seed | Who | None = None
    max_tokens: Count = 40


class Side(Sampling):
    """One of two that are compared: a prompt or messages, with settings of its own."""

    prompt: Words | None = None
    messages: Messages | None = None
    inference_mode: Literal["causal", "standard", "compatible"] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Side:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a side has either prompt or messages")
        return self


class Contains(Strict):
    """1 where the text has this in it, else 0."""

    contains: Words


class CompareRequest(Sampling):
    """POST /v1/compare."""

    model: str | None = None
    a: Side
    b: Side
    score: Literal["characters", "tokens", "distinct_tokens", "nats", "number"] | Contains = "characters"
    pairs: Annotated[int, Field(ge=2, le=MOST_PAIRS)] = 32
    seed: Seed = 0
    coupling: Literal["individual", "independent"] = "individual"
    inference_mode: Literal["causal", "standard", "compatible"] | None = None
    max_tokens: Count = 40
    interval_level: Level = 0.95
    stream: bool | None = None
