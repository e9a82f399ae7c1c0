"""``ModelTokenizer``: one model's tokenizer and chat template."""

import asyncio
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import msgspec
from tokenizers import Tokenizer

from dynctl.base.turns import Apart
from dynctl.tokenization.budget import RenderLimits
from dynctl.tokenization.encoders import Choice, Encoder, ReferenceEncoder, cache_directory, faster
from dynctl.tokenization.errors import (
    PromptError,
    PromptTooLongError,
    TokenizerError,
    raise_unless_native,
)
from dynctl.tokenization.isolated import (
    IsolatedEncoder,
    IsolatedParts,
    IsolatedTemplate,
    UnknownParts,
    UnknownTemplate,
    UnknownTokenizer,
)
from dynctl.tokenization.known_parts import unknown_decoder, unknown_part
from dynctl.tokenization.known_templates import is_known
from dynctl.tokenization.model_directory import ModelFiles, read_model_files
from dynctl.tokenization.template import ChatOptions, ChatTemplate, Message, TemplateProgram

T = TypeVar("T")
#: Long prompts of one model that are encoded at a time, so that a burst of them leaves cores to the
#: event loop; each takes milliseconds.
THREADS: Final = max(1, min(8, (os.cpu_count() or 2) // 2))

#: Messages and tools of a chat, and characters, that a known template renders on the event loop:
#: what the templates of the list were measured with.
_MANY_MESSAGES: Final = 256
_LONG_CHAT: Final = 300_000

DEMO_MODEL_DIR = Path(__file__).parent / "demo_model"
"""A small tokenizer (ChatML template) for the demo, simulated engines and tests."""


def load_tokenizer(
    model_dir: Path | str,
    *,
    max_prompt_chars: int = 8 * 1024 * 1024,
    trust_template: bool = False,
) -> "ModelTokenizer":
    """The tokenizer of a Hugging Face model directory.

    Reads tokenizer.json, tokenizer_config.json, config.json, chat_template.json and
    chat_template.jinja; only the first must exist. Templates are compiled here, so that an invalid
    one is an error at start. ``trust_template``: they run without a meter.
    Raises :class:`TokenizerError` or :class:`TemplateError`.
    """
    return ModelTokenizer(
        read_model_files(Path(model_dir)),
        max_prompt_chars=max_prompt_chars,
        trust_template=trust_template,
    )


#: Texts of single tokens that are kept: a stream needs that of each token twice.
_KEPT_TEXTS: Final = 16_384


class ModelTokenizer:
    """The tokenizer and the chat templates of a model. Thread-safe.

    ``max_length``: tokens, or ``None`` if unknown. ``eos_token_ids``: the ids that end a
    generation. ``fingerprint``: hex, equal for two tokenizers from the same files.
    ``vocab_size``: number of ids, added tokens included. ``encoder`` makes the token ids.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        max_prompt_chars: int = 8 * 1024 * 1024,
        trust_template: bool = False,
    ) -> None:
        self.directory = files.directory
        self.max_length = files.max_length
        self.max_prompt_chars = max_prompt_chars
        self.fingerprint = files.fingerprint
        path = files.directory / "tokenizer.json"
        plain, apart = _divide_tokenizer(files.tokenizer_json, path)
        try:
            self._tokenizer = Tokenizer.from_str(plain)
        except BaseException as error:  # the Rust side raises plain Exception, or panics
            raise_unless_native(error)
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        # Some files contain the truncation of their training; engines ignore it too.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._json = files.tokenizer_json
        self._apart = apart
        unknown = _unknown(files, apart, trust_template=trust_template, chars=max_prompt_chars)
        self._parts = None if unknown is None else IsolatedParts(unknown)
        self._reference: Encoder = (
            ReferenceEncoder(self._tokenizer)
            if apart is None or self._parts is None
            else IsolatedEncoder(self._parts)
        )
        self.encoder: Encoder = self._reference
        self._threads: ThreadPoolExecutor | None = None
        self._text_of = lru_cache(_KEPT_TEXTS)(self._decode)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        eos = files.special_tokens.get("eos_token")
        eos_id = self._tokenizer.token_to_id(eos) if eos is not None else None
        self.eos_token_ids = files.eos_token_ids | ({eos_id} if eos_id is not None else set())
        limits = RenderLimits(output_chars=max_prompt_chars)
        self._templates = {
            name: ChatTemplate(
                source,
                origin=_origin(files, name),
                variables=files.special_tokens,
                limits=limits,
                trusted=trust_template,
                program=self._isolated_template(name),
            )
            for name, (source, _) in files.templates.items()
        }

    def _isolated_template(self, name: str) -> IsolatedTemplate | None:
        if self._parts is None or name not in self._parts.shapes:
            return None
        return IsolatedTemplate(self._parts, name)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def speed_up(self, choice: Choice) -> list[str]:
        """Use a faster encoder where one gives the same ids (see :mod:`.encoders`); returns why
        faster ones are not used.

        Takes 2 s for a vocabulary of 130,000. Raises :class:`TokenizerError` for "fast" without
        one.
        """
        encoder: Encoder | None = None
        if isinstance(self._reference, ReferenceEncoder):
            encoder, reasons = faster(self._json, self._reference, choice, cache=cache_directory())
        else:
            reasons = [f"its {self._apart} may cost more than its text, so it runs apart"]
        if encoder is not None:
            self.encoder = encoder
        elif choice == "fast":
            raise TokenizerError(
                f"no fast tokenizer for {self.directory}: {'; '.join(reasons)}; "
                "use --tokenizer auto"
            )
        return reasons

    def encode_flat(
        self, text: str, *, add_special_tokens: bool = False, field: str = "prompt"
    ) -> "array[int]":
        """As :meth:`encode`, as an ``array("I")``, from which block hashes are made faster."""
        if len(text) > self.max_prompt_chars:
            raise PromptTooLongError(len(text), self.max_prompt_chars, field=field)
        if self.encoder is not self._reference:
            # What a faster encoder refuses is for the reference to judge.
            try:
                return self.encoder.encode(text, add_special_tokens=add_special_tokens)
            except BaseException as error:
                raise_unless_native(error)
        try:
            return self._reference.encode(text, add_special_tokens=add_special_tokens)
        except PromptError as error:
            error.field = field
            raise
        except BaseException as error:  # lone surrogates, and errors of a broken model
            raise_unless_native(error)
            raise _not_encoded(field, error) from error

    def encode(
        self, text: str, *, add_special_tokens: bool = False, field: str = "prompt"
    ) -> list[int]:
        """Token ids of a text; special tokens in it keep their meaning, as in engines."""
        return self.encode_flat(text, add_special_tokens=add_special_tokens, field=field).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a plain prompt (/v1/completions), with the special tokens of the model."""
        return self.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; unknown ids are skipped. Raises PromptError for no valid id."""
        if len(ids) == 1:
            return self._text_of(tuple(ids), skip_special_tokens)
        return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise PromptError(
                "expected token ids from 0 to 4294967295", field="token_ids"
            ) from error
        except BaseException as error:
            raise_unless_native(error)
            raise PromptError(
                f"the model's decoder failed ({type(error).__name__})", field="token_ids"
            ) from error

    def render_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """The prompt text of a chat. Errors as :meth:`ChatTemplate.render`."""
        template, _ = self._template_of(messages, options.get("tools"))
        return template.render(messages, **options)

    def _template_of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[ChatTemplate, int]:
        """The template for a chat, and the characters of its messages. Raises PromptError for a
        chat that is too long, and where there is no template."""
        chars = _text_chars(messages)
        if chars > self.max_prompt_chars:
            raise PromptTooLongError(chars, self.max_prompt_chars)
        return self.template_for(with_tools=bool(tools)), chars

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a chat. The template has its own special tokens, so none are added."""
        template, _ = self._template_of(messages, options.get("tools"))
        variables = template.variables(messages, **options)
        return self._encoded_chat(template.program, variables).tolist()

    def _encoded_chat(self, program: TemplateProgram, variables: Mapping[str, Any]) -> "array[int]":
        """The token ids of a render."""
        if isinstance(program, IsolatedTemplate) and isinstance(self.encoder, IsolatedEncoder):
            try:
                return program.encode_chat(variables)
            except PromptError:
                raise
            except ValueError as error:
                raise _not_encoded("messages", error) from error
        return self.encode_flat(program.run(variables), field="messages")

    async def encode_chat_async(
        self,
        messages: Sequence[Message],
        *,
        apart: Apart | None = None,
        **options: Unpack[ChatOptions],
    ) -> "array[int]":
        """As :meth:`encode_chat`; a long text is encoded in a thread, which releases the GIL.

        Rendering stays on the event loop where the template is known to be quick, and the chat is
        of a usual size; else a thread renders too, where the event loop can preempt it, or waits
        for the process of the template. ``apart`` renders a large chat, in a thread that large
        requests share.
        """
        tools = options.get("tools")
        choose = partial(self._template_of, messages, tools)
        template, chars = choose() if apart is None else await apart(choose)
        variables = partial(template.variables, messages, **options)
        program = template.program
        encoded = partial(self._encoded_chat, program)
        if program.heavy:
            return await self._in_thread(lambda: encoded(variables()))
        if apart is not None:
            text = await apart(lambda: program.run(variables()))
        elif len(messages) + len(tools or ()) > _MANY_MESSAGES or chars > _LONG_CHAT:
            return await self._in_thread(lambda: encoded(variables()))
        else:
            text = program.run(variables())
        if len(text) < self.encoder.thread_chars:
            return self.encode_flat(text, field="messages")
        return await self._in_thread(partial(self.encode_flat, text, field="messages"))

    async def encode_prompt_async(
        self, text: str, *, add_special_tokens: bool = True
    ) -> "array[int]":
        """As :meth:`encode_prompt`, in a thread when long."""
        encode = partial(self.encode_flat, text, add_special_tokens=add_special_tokens)
        if len(text) < self.encoder.thread_chars:
            return encode()
        return await self._in_thread(encode)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """The result of ``work`` in one of this model's threads; more work waits for one."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def template_for(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a chat. Raises PromptError if there is none."""
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        known = f" (it has: {', '.join(sorted(self._templates))})" if self._templates else ""
        raise PromptError(
            f"the model has no default chat template{known}; put chat_template.jinja into "
            f"{self.directory}, or send the text to /v1/completions",
            field="messages",
        )


def _divide_tokenizer(tokenizer_json: str, path: Path) -> tuple[str, str | None]:
    """What of a tokenizer runs in this process, and the part for which texts are encoded in
    another one, None: all of it runs here. Raises TokenizerError."""
    try:
        content = msgspec.json.decode(tokenizer_json)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TokenizerError(f"{path} is not a tokenizer: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a tokenizer: expected an object")
    decoder = unknown_decoder(content)
    if decoder is not None:
        raise TokenizerError(
            f"{path} is refused: its {decoder} is not one of those whose cost is known"
        )
    apart = unknown_part(content)
    if apart is None:
        return tokenizer_json, None
    # Decoding needs the vocabulary and the decoder alone.
    here = {**content, "normalizer": None, "pre_tokenizer": None, "post_processor": None}
    return msgspec.json.encode(here).decode(), apart


def _origin(files: ModelFiles, name: str) -> str:
    """The name of a template in errors."""
    return f"{files.directory / files.templates[name][1]} (template {name!r})"


def _unknown(
    files: ModelFiles, apart: str | None, *, trust_template: bool, chars: int
) -> UnknownParts | None:
    """What of a model runs in another process: its tokenizer, if it has the unknown part ``apart``,
    and templates that are neither known nor trusted. None: all of it runs here."""
    tokenizer = None
    if apart is not None:
        path = files.directory / "tokenizer.json"
        tokenizer = UnknownTokenizer(files.tokenizer_json, str(path), apart)
    templates = {
        name: UnknownTemplate(source, _origin(files, name))
        for name, (source, _) in files.templates.items()
        if not trust_template and not is_known(source)
    }
    if tokenizer is None and not templates:
        return None
    return UnknownParts(tokenizer, templates, chars)


def _not_encoded(field: str, error: BaseException) -> PromptError:
    return PromptError(
        f"{field} cannot be encoded ({type(error).__name__}); expected Unicode text", field=field
    )


def _text_chars(messages: Sequence[Message]) -> int:
    total = 0
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"messages[{index}] is {type(message).__name__}; expected an object with a role",
                field=f"messages[{index}]",
            )
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                total += len(text)
    return total
