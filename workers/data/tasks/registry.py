"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.data.tasks.classification import Classification
from workers.data.tasks.language import Chat, Language
from workers.data.tasks.masked_language import MaskedLanguage
from workers.data.tasks.question_answering import QuestionAnswering
from workers.data.tasks.task import Setting, Task

TASKS: Mapping[str, Callable[[Setting], Task]] = {
    "language": Language,
    "chat": Chat,
    "masked-language": MaskedLanguage,
    "classification": Classification,
    "question-answering": QuestionAnswering,
}
"""A new one is a file here and its name in `DataConfig.task`."""
