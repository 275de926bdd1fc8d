"""Xitter: a simulated social feed, on which the policy posts, likes and comments.

    feed, trend -> [JSON action -> reactions, new posts] x N

The policy is one of the agents; the others are simulated by rules. Each has two interests, which
its posts show. A post about an interest is liked; one that also asks something is commented on.
Feeds are made from seeds, and are the same for all rollouts of a group. Needs no data:

    python environments/community/xitter_env/xitter_env.py process --env.total_steps 4
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.tasks.answers import is_repetition, only_json_object, words_of
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import GameEnvConfig, SeededEnv
from atroposlib.utils.text import inert_line

__all__ = ["Action", "Feed", "Post", "XitterConfig", "XitterEnv", "read_action"]

CARD = EnvironmentCard(
    task="post, like and comment on a simulated social feed",
    turns="8",
    reward="per turn: 0.05 like, 0.1 comment, 0.2 post on the trend, 0.1 and 0.5 for reactions; "
    "-0.01 an action, -0.5 an invalid one",
    data="made on the spot",
    command="process --env.total_steps 4",
)

LIKED, COMMENTED = 0.05, 0.1
TURNS_PER_TREND = 2
MAX_SHOWN_POSTS = 12
MAX_POST_CHARACTERS = 280
MAX_ACTION_CHARACTERS = 2_000
MIN_POST_WORDS, MIN_COMMENT_WORDS = 4, 2
MAX_TOPICS = 2
"""A post about more topics is spam, to which agents do not react."""
TOPICS = (
    *("astronomy", "baking", "beekeeping", "chess", "cinema", "climbing", "coffee", "cycling"),
    *("gardening", "geology", "jazz", "knitting", "lighthouses", "origami", "photography"),
    *("puzzles", "railways", "sailing", "tea", "volcanoes"),
)
NAMES = (
    *("alba", "bertil", "cora", "dario", "edda", "fenno", "gita", "hanno", "ilka", "jonte"),
    *("kaja", "luc", "mirja", "nilo", "orla", "pim"),
)
LINES = (
    "Spent the whole morning on {topic} and regret nothing.",
    "There is not enough talk about {topic}.",
    "A good day for {topic}, a bad one for the laundry.",
    "My neighbor has discovered {topic} as well.",
    "Learned something new about {topic} today.",
    "Everything I know about patience comes from {topic}.",
)
SYSTEM_PROMPT = (
    "You are {name}, one of {num_agents} agents on a social feed. There are {max_turns} turns; in "
    "each you take one action, as a JSON object and nothing else:\n"
    '{{"action": "post", "content": "TEXT"}}\n'
    '{{"action": "like", "post_id": 3}}\n'
    '{{"action": "comment", "post_id": 3, "content": "TEXT"}}\n'
    '{{"action": "nothing"}}\n\n'
    "You gain by posts on the trending topic, by likes and, most of all, by comments that your "
    "posts get; liking and commenting gain a little. Find out from their posts what the others "
    "are interested in: they react to posts about that, and comment if they are asked something. "
    "Repetitions and lists of topics get no reaction. A text has at most "
    f"{MAX_POST_CHARACTERS} characters; a post can be liked and commented on once, and not by its "
    "author. You may think first between <think> and </think>."
)


class XitterConfig(GameEnvConfig):
    """Settings of the feed and of the rewards."""

    like_reward_weight: float = Field(
        0.1, ge=0, le=100, description="Reward for each like that a post of the policy gets."
    )
    comment_reward_weight: float = Field(
        0.5, ge=0, le=100, description="Reward for each comment that a post of the policy gets."
    )
    trending_topic_bonus: float = Field(
        0.2, ge=0, le=100, description="Reward for a post on the trending topic."
    )
    invalid_action_penalty: float = Field(
        -0.5, ge=-100, le=0, description="Reward of a turn without a valid action."
    )
    action_cost: float = Field(
        -0.01, ge=-100, le=0, description="Reward added for each action but nothing."
    )
    num_agents: int = Field(
        2, ge=2, le=len(NAMES), description="Number of agents, the policy included."
    )


class Action(NamedTuple):
    """One action."""

    kind: str
    """`post`, `like`, `comment` or `nothing`."""
    post_id: int = -1
    content: str = ""


@dataclass
class Post:
    """One post of the feed."""

    author: str
    text: str
    likes: set[str] = field(default_factory=set)
    """Names of the agents that like it."""
    comments: list[tuple[str, str]] = field(default_factory=list)
    """Author and text of each comment."""


def read_action(answer: str) -> Action | None:
    """Return the action of a turn, in a code block or without; None unless it is well-formed.

    Args:
        answer: the completion without its thinking.
    """
    found = only_json_object(answer, max_characters=MAX_ACTION_CHARACTERS)
    if found is None or not isinstance(found.get("action"), str):
        return None
    post_id, content = found.get("post_id", -1), found.get("content", "")
    if type(post_id) is not int or not isinstance(content, str):
        return None
    content = inert_line(content, max_characters=MAX_POST_CHARACTERS + 1).strip()
    return Action(found["action"], post_id, content)


class Feed(Conversation):
    """One feed, and the policy's turns on it.

    Args:
        seed: seed of the agents, of their posts and of the trends.
        config: settings of the feed.

    Attributes:
        posts: all posts, oldest first; the index is the id.
        interests: the two interests of each simulated agent, by name.
        num_invalid: number of turns without a valid action.
    """

    def __init__(self, seed: int, config: XitterConfig) -> None:
        source = random.Random(seed)
        self._config = config
        self._me, *others = source.sample(NAMES, config.num_agents)
        self.interests = {name: source.sample(TOPICS, 2) for name in others}
        self._seed = seed
        self._turn = 0
        self.posts: list[Post] = []
        self.num_invalid = 0
        self.unfinished_reward = config.invalid_action_penalty
        for shift in range(2):
            self._others_post(shift - 2)

    def trend(self, turn: int) -> str:
        """Return the trending topic of a turn."""
        return random.Random(f"{self._seed} trend {turn // TURNS_PER_TREND}").choice(TOPICS)

    def opening(self) -> list[ChatMessage]:
        system = SYSTEM_PROMPT.format(
            name=self._me, num_agents=self._config.num_agents, max_turns=self._config.max_turns
        )
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": self._shown()},
        ]

    async def reply(self, turn: Turn) -> Reply:
        action = read_action(turn.answer)
        reward, note = self.act(action) if action is not None else self._invalid("not an action")
        self._turn = turn.index + 1
        if self._turn >= self._config.max_turns:
            return Reply(reward=reward, is_done=True)
        self._others_post(self._turn)
        return Reply(f"{note}\n\n{self._shown()}", reward=reward)

    def act(self, action: Action) -> tuple[float, str]:
        """Take an action of the policy; return its reward and what has happened."""
        cost = self._config.action_cost
        if action.kind == "nothing":
            return 0.0, "You did nothing."
        if len(action.content) > MAX_POST_CHARACTERS:
            return self._invalid(f"a text has at most {MAX_POST_CHARACTERS} characters")
        if action.kind == "post":
            if len(words_of(action.content)) < MIN_POST_WORDS:
                return self._invalid(f"a post has {MIN_POST_WORDS} different words or more")
            return self._post(action.content)
        if not 0 <= action.post_id < len(self.posts):
            return self._invalid("there is no such post")
        post = self.posts[action.post_id]
        if post.author == self._me:
            return self._invalid("it is your own post")
        if action.kind == "like":
            if self._me in post.likes:
                return self._invalid("you like it already")
            post.likes.add(self._me)
            return LIKED + cost, f"You like post {action.post_id}."
        if action.kind != "comment":
            return self._invalid("there is no such action")
        own = [text for p in self.posts for name, text in p.comments if name == self._me]
        if any(name == self._me for name, _ in post.comments):
            return self._invalid("you have commented on it already")
        if len(words_of(action.content)) < MIN_COMMENT_WORDS or is_repetition(action.content, own):
            return self._invalid("the comment is too short, or repeats another")
        post.comments.append((self._me, action.content))
        return COMMENTED + cost, f"You have commented on post {action.post_id}."

    def _invalid(self, reason: str) -> tuple[float, str]:
        self.num_invalid += 1
        return self._config.invalid_action_penalty, f"Invalid: {reason}."

    def _post(self, text: str) -> tuple[float, str]:
        config = self._config
        words = words_of(text)
        topics = words & set(TOPICS)
        is_dull = len(topics) > MAX_TOPICS or is_repetition(text, [p.text for p in self.posts])
        post = Post(self._me, text)
        self.posts.append(post)
        if is_dull:
            return config.action_cost, "Your post gets no reaction."
        fans = [name for name, liked in self.interests.items() if topics & set(liked)]
        post.likes.update(fans)
        if "?" in text:
            post.comments += [(name, "Good question, I wonder as well.") for name in fans]
        bonus = config.trending_topic_bonus if self.trend(self._turn) in topics else 0.0
        gained = config.like_reward_weight * len(post.likes)
        gained += config.comment_reward_weight * len(post.comments)
        note = f"Your post has {len(post.likes)} likes and {len(post.comments)} comments."
        return config.action_cost + bonus + gained, note

    def _others_post(self, turn: int) -> None:
        for name, liked in self.interests.items():
            source = random.Random(f"{self._seed} {name} {turn}")
            line = source.choice(LINES).format(topic=liked[turn % 2])
            self.posts.append(Post(name, line))

    def _shown(self) -> str:
        first = max(0, len(self.posts) - MAX_SHOWN_POSTS)
        lines = [
            f"[{first + i}] {post.author}: {post.text} "
            f"({len(post.likes)} likes, {len(post.comments)} comments)"
            for i, post in enumerate(self.posts[first:])
        ]
        left = self._config.max_turns - self._turn
        return "\n".join([f"Trending: {self.trend(self._turn)}. Turns left: {left}.", *lines])

    def state(self) -> dict[str, Any]:
        posts = [[p.author, p.text, sorted(p.likes), p.comments] for p in self.posts]
        return {"posts": posts, "turn": self._turn, "num_invalid": self.num_invalid}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.posts = [
            Post(author, text, set(likes), [(name, comment) for name, comment in comments])
            for author, text, likes, comments in state["posts"]
        ]
        self._turn, self.num_invalid = state["turn"], state["num_invalid"]


class XitterEnv(SeededEnv):
    """Feeds from seeds; an item has the `seed`."""

    name = "xitter"
    env_config_cls = XitterConfig
    config: XitterConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "max_turn_tokens": 512,
        "wandb_name": "xitter",
    }

    def start_conversation(self, item: Mapping[str, int]) -> Feed:
        return Feed(item["seed"], self.config)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        if rollouts:
            feeds = [cast(Feed, rollout.conversation) for rollout in rollouts]
            metrics[f"{area}/invalid_actions"] = statistics.fmean(f.num_invalid for f in feeds)
        return metrics

    def check_gold_answer(self, item: Mapping[str, int]) -> list[str]:
        feed = self.start_conversation(item)
        liked = next(iter(feed.interests.values()))[0]
        return [
            json.dumps(
                {
                    "action": "post",
                    "content": f"{feed.trend(turn)} with {liked}: who tried variant{turn} or "
                    f"idea{turn} or plan{turn}?",
                }
            )
            for turn in range(self.config.max_turns)
        ]


if __name__ == "__main__":
    XitterEnv.cli()
