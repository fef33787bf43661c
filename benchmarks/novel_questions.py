"""Make assets/novel_questions*.jsonl: questions on the bundled novel whose answers stand in it, found by rule.

    python benchmarks/novel_questions.py

Who says something, and in which chapter; and how a sentence goes on. Every tenth is held out.
"""

import gzip
import json
import re
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SAID = re.compile(
    r'"([^"]{25,150})[,.!?]" (?:said|cried|replied) ((?:(?:Mr|Mrs)\. |Miss |Lady |Sir )?(?:[A-Z][a-z]+ )?[A-Z][a-z]+)\b'
)
SENTENCE = re.compile(r"(?<=[.!?] )([A-Z][^.!?\"_;]{70,170}, [^.!?\"_;]{40,110}\.)(?= )")
SYSTEM = "Answer from Pride and Prejudice."


def main() -> None:
    novel = gzip.open(ASSETS / "pride_and_prejudice.txt.gz", "rt", encoding="utf-8").read()
    questions = []
    for chapter, text in enumerate(re.split(r"^Chapter \d+$", novel, flags=re.MULTILINE)[1:], 1):
        text = " ".join(text.split())
        for said, who in SAID.findall(text):
            questions.append((f'Who says "{said.strip()}"?', f"{who} says it, in chapter {chapter}."))
        for sentence in SENTENCE.findall(text)[:3]:
            begin, end = sentence.split(", ", 1) if sentence.index(", ") > 40 else sentence.rsplit(", ", 1)
            questions.append((f'How does this go on: "{begin},"', end))
    of_part: dict[str, list[str]] = {"": [], "_held_out": []}
    for number, (question, answer) in enumerate(dict(questions).items()):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        part = "_held_out" if number % 10 == 9 else ""
        of_part[part].append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    for part, lines in of_part.items():
        (ASSETS / f"novel_questions{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"novel_questions{part}.jsonl: {len(lines)} conversations")


if __name__ == "__main__":
    main()
