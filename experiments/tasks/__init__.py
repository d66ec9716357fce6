"""Verifiable tasks: prompts with one right answer, split into train and held-out by the prompt itself."""

from experiments.tasks.protocol import Example as Example
from experiments.tasks.protocol import Message as Message
from experiments.tasks.protocol import Prompt as Prompt
from experiments.tasks.protocol import Split as Split
from experiments.tasks.protocol import Task as Task
from experiments.tasks.protocol import split_of as split_of
from experiments.tasks.registry import TASK_FORMS as TASK_FORMS
from experiments.tasks.registry import make_task as make_task
from experiments.tasks.rewards import Completion as Completion
from experiments.tasks.rewards import Reward as Reward
from experiments.tasks.rewards import Rewards as Rewards
from experiments.tasks.rewards import RewardTerm as RewardTerm
