"""Prompts to tokens and back: a model's tokenizer, and its chat template in a sandbox."""

from dynctl.tokenization.budget import RenderLimits
from dynctl.tokenization.dynamo_chat import (
    DynamoChat,
    as_dynamo_reads,
    encode_as_dynamo,
    wants_thinking,
)
from dynctl.tokenization.errors import (
    PromptError,
    PromptTooLongError,
    TemplateError,
    TokenizationError,
    TokenizerError,
    UnsupportedContentError,
)
from dynctl.tokenization.model import DEMO_MODEL_DIR, ModelTokenizer, load_tokenizer
from dynctl.tokenization.model_directory import read_model_config
from dynctl.tokenization.template import ChatTemplate

__all__ = [
    "DEMO_MODEL_DIR",
    "ChatTemplate",
    "DynamoChat",
    "ModelTokenizer",
    "PromptError",
    "PromptTooLongError",
    "RenderLimits",
    "TemplateError",
    "TokenizationError",
    "TokenizerError",
    "UnsupportedContentError",
    "as_dynamo_reads",
    "encode_as_dynamo",
    "load_tokenizer",
    "read_model_config",
    "wants_thinking",
]
