"""One model as an ingress process knows it: its settings, its replicas, and how to speak its text.

The text part comes from a replica as one message, so that an ingress never loads torch or reads model files.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from deployments.config import ModelSettings
from deployments.model_client import ModelClient
from replica.config import SchedulerConfig
from replica.errors import BrimfulError, Unavailable
from replica.model.api import ModelShape
from replica.model_card import ModelCard, TextBundle
from replica.text.chat_encoding import ChatEncoder
from replica.text.chat_template import ChatTemplate
from replica.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

RETRY_LOADING_S = 0.5
RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelText:
    """All that turns a client's words into ids and limits. `chat` is None for a model without a chat template."""

    card: ModelCard
    shape: ModelShape
    tokenizer: Tokenizer
    chat: ChatEncoder | None

    @classmethod
    def from_bundle(cls, bundle: TextBundle, shape: ModelShape) -> ModelText:
        """Takes seconds for a large vocabulary: call it in a thread. Raises `ModelUnsupported`."""
        card = bundle.card
        tokenizer = Tokenizer(bundle.tokenizer_json, card)
        chat = None
        if card.chat_template is not None:
            chat = ChatEncoder(tokenizer, ChatTemplate(card.chat_template, card.special_tokens))
        return cls(card, shape, tokenizer, chat)


class ServedModel:
    """A model under its served name. Usable by requests once `load` is through and while a replica runs."""

    def __init__(self, settings: ModelSettings, bounds: SchedulerConfig, client: ModelClient, created_s: int) -> None:
        self.settings = settings
        self.bounds = bounds
        self.client = client
        self.created_s = created_s
        self._text: ModelText | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def ready(self) -> bool:
        """A replica runs now (Serve lets one run only after it has generated a token) that isn't known to be dead or
        silent, and its text can be spoken."""
        return self._text is not None and self.client.num_ready() > 0

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and output together, in tokens; None until a replica has told."""
        return self._text.shape.max_model_len if self._text else None

    def text(self) -> ModelText:
        """Raises `Unavailable` until the first replica is up."""
        if self._text is None:
            raise Unavailable("the model is still loading", retry_after_s=RETRY_AFTER_S)
        return self._text

    async def load(self) -> None:
        """Ask for the model's text until a replica answers."""
        while self._text is None:
            try:
                bundle, shape = await self.client.facts()
                self._text = await asyncio.to_thread(ModelText.from_bundle, bundle, shape)
            except BrimfulError as error:
                logger.info("model %s isn't ready yet: %s", self.name, error)
                await asyncio.sleep(RETRY_LOADING_S)
            except Exception:
                logger.exception("model %s: its text can't be loaded", self.name)
                await asyncio.sleep(RETRY_AFTER_S)
