"""The one prompt function. Every stage turns text into ids here, so all of them see the same prompt."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

# Said explicitly: without a system turn several templates insert one of their own. --system replaces it.
SYSTEM = "You are a helpful office assistant."


def load_tokenizer(model_dir: Path):
    """The folder's own tokenizer. Raises ValueError with one line if its files are broken."""
    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{model_dir}: the tokenizer does not load ({first})") from error


# For tokenizers without a chat template (00_prepare.py --no-chat-template); the answer follows on a
# line of its own, so its first token does not depend on the prompt's last.
PLAIN = "{system}\n\nUser:\n{prompt}\n\nAssistant:\n"


def special_ids(model_dir: Path, chat_template: bool = True) -> tuple[dict[str, int], str]:
    """eos_id and pad_id of somebody's own model folder, and one line on where they come from.

    EOS is the tokenizer's. Padding is always masked, so any other id will do as pad: the tokenizer's
    own if it is not EOS, else 0 (or 1). Raises ValueError without an EOS, without a chat template
    (unless none is wanted), or if the tokenizer has ids that the model has no embedding for.
    """
    tokenizer = load_tokenizer(model_dir)
    rows = AutoConfig.from_pretrained(model_dir, local_files_only=True).vocab_size
    if len(tokenizer) > rows:
        raise ValueError(
            f"{model_dir}: the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{model_dir}: the tokenizer names no end token (eos_token)")
    if chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"{model_dir}: the tokenizer has no chat template; an instruct model has one, and "
            "--no-chat-template takes a plain form of the prompt"
        )
    eos_id, pad_id, why = tokenizer.eos_token_id, tokenizer.pad_token_id, "the tokenizer's own"
    if pad_id is None or pad_id == eos_id:
        why = "the tokenizer names none" if pad_id is None else "the tokenizer's is its end token"
        pad_id = 0 if eos_id != 0 else 1
    said = f"end token {eos_id}, pad {pad_id} ({tokenizer.eos_token}; pad: {why}, always masked)"
    return {"eos_id": eos_id, "pad_id": pad_id}, said


class Chat:
    """A tokenizer with its rules for pad, EOS and limits."""

    def __init__(self, config: dict):
        folder = Path(config["model_dir"])
        self.tokenizer = load_tokenizer(folder)
        self.eos_id, self.pad_id = config["eos_id"], config["pad_id"]
        self.template = config.get("chat_template", True)  # False: the plain form
        self.system = config.get("system", SYSTEM)
        self._check_text(self.system, "--system")
        self.vocabulary = len(self.tokenizer)
        self.prompt_limit = config["prompt_limit"]
        self.response_limit = config["response_limit"]

    def prompt_ids(self, prompt: str, where: str = "prompt") -> list[int]:
        """System turn, user turn, and the header that opens the answer. ValueError if over the limit."""
        self._check_text(prompt, where)
        if self.template:
            text = self.tokenizer.apply_chat_template(
                [{"role": "system", "content": self.system}, {"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
            )
        else:
            text = PLAIN.format(system=self.system, prompt=prompt)
        # The template writes its own control tokens; adding special tokens would double them.
        ids = self.tokenizer(text, add_special_tokens=not self.template).input_ids
        if ids[-1] == self.eos_id and not self.template:
            ids.pop()  # some tokenizers end every text; the answer has not begun yet
        if len(ids) > self.prompt_limit:
            raise ValueError(f"{where}: {len(ids)} prompt tokens, limit {self.prompt_limit}")
        return ids

    def response_ids(self, response: str, where: str = "response") -> list[int]:
        """The answer's ids and one EOS. Tokenised apart from the prompt and joined as ids, because
        joined text can merge tokens across the boundary. ValueError if over the limit or empty."""
        self._check_text(response, where)
        ids = self.tokenizer(response, add_special_tokens=False).input_ids + [self.eos_id]
        if len(ids) == 1:
            raise ValueError(f"{where}: the answer is empty")
        if len(ids) > self.response_limit:
            raise ValueError(
                f"{where}: {len(ids)} answer tokens with EOS, limit {self.response_limit}"
            )
        return ids

    def encode_prompts(self, rows: list[dict], name: str) -> list[list[int]]:
        """Prompt ids per row; `name` is the file that a fault is reported in."""
        return [self.prompt_ids(row["prompt"], where) for row, where in with_places(rows, name)]

    def encode_answers(self, rows: list[dict], answer: str, name: str) -> list[tuple]:
        """(prompt ids, response ids) per row."""
        return [
            (self.prompt_ids(row["prompt"], where), self.response_ids(row[answer], where))
            for row, where in with_places(rows, name)
        ]

    def encode_pairs(self, rows: list[dict], name: str) -> list[tuple]:
        """(prompt ids, chosen ids, rejected ids) per row. ValueError if the two answers are equal."""
        pairs = []
        for row, where in with_places(rows, name):
            chosen = self.response_ids(row["chosen"], where)
            rejected = self.response_ids(row["rejected"], where)
            if chosen == rejected:
                raise ValueError(f"{where}: chosen and rejected are the same tokens")
            pairs.append((self.prompt_ids(row["prompt"], where), chosen, rejected))
        return pairs

    def decode(self, ids: list[int]) -> str | None:
        """Text of a response without its EOS; None if an id has no token (padded vocabularies)."""
        if ids and ids[-1] == self.eos_id:
            ids = ids[:-1]
        if any(i >= self.vocabulary for i in ids):
            return None
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token_texts(self, ids: list[int]) -> list[str]:
        return [self.decode([i]) if i != self.eos_id else "<eos>" for i in ids]

    def _check_text(self, text: str, where: str) -> None:
        for token in self.tokenizer.get_added_vocab():  # all of them, not only EOS and pad
            if token in text:
                raise ValueError(f"{where}: the text contains the control token {token}")


def with_places(rows: list[dict], name: str):
    """(row, "file row n") for error messages."""
    return ((row, f"{name} row {number}") for number, row in enumerate(rows, start=1))
