"""Varied strings, the same ones every time, on which two tokenizers are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence

_PIECES = {
    "words": "The quick brown foxes don't jump; they'll say WE'RE sure it's I'M naïve café Ångström Straße élève "
    "unbelievable Mamba2 GPT-4o camelCase HTTPServer snake_case antidisestablishmentarianism e.g. U.S.A.",
    "code": "def f(x): return {'a': [1, 2], \"b\": x**2} if(!ok&&n>=0){i++;} </div> <a href='#'> #include <stdio.h> "
    "$HOME/.cache \\n \\\\ //TODO /* c */ => -> :: ... === __init__ @dataclass `x` %d %s 0xFF 1e-5 ;; }}} ((( ]]",
    "numbers": "0 7 42 123 1234 12345 1,000,000 3.14159 2024-11-15 ½ ² ③ Ⅷ ٣٤ १२ 12:30 $9.99 50% 1st 007",
    "emoji": "🙂 👍🏽 🏳️‍🌈 👩‍👩‍👧‍👦 ❤️ 🇩🇪 ✨🚀 ☃ 🧪🧪 ©",
    "east": "漢字 かな交じり文 カタカナ 한국어 中文。 你好，世界！ 日本語テスト 東京都 「引用」 全角１２３ ＡＢＣ",
    "south": "مرحبا بالعالم، שלום नमस्ते दुनिया สวัสดีครับ বাংলা தமிழ் العربية ١٢٣ हिन्दी ગુજરાતી",
    "north": "Привет мир Москва ΑΒΓ αβγ Ελλάδα Україна їжак Łódź žluťoučký kůň Ünïcödé İstanbul",
    "marks": "!? ... -- — “quoted” ‘single’ «guillemets» ;:, (brackets) [x] {y} <z> | & ^ ~ ` § ¶ • … ′ ″ @user #tag",
    "control": "\t \r\n \x01 \x1b[0m \x7f \u200b \ufeff \u00a0 \u2003 \ufffd \U0010ffff \ud7ff",
}  # fmt: skip
_GAPS = ("", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "        ", "\n    ")


def sample_strings(count: int, special: Sequence[str] = ()) -> list[str]:
    """Code, numbers, emoji, many scripts, runs of spaces, and the `special` tokens' texts in between."""
    chosen = random.Random(0)
    kinds = {name: text.split(" ") for name, text in _PIECES.items()}
    strings = []
    for _ in range(count):
        pieces = []
        few = chosen.sample(list(kinds), chosen.randint(1, 3))
        for _ in range(chosen.randint(1, 12)):
            words = special if special and chosen.random() < 0.1 else kinds[chosen.choice(few)]
            word = chosen.choice(words)
            if chosen.random() < 0.1:  # cut anywhere, or repeated
                at = chosen.randint(0, len(word))
                word = word[:at] or word * chosen.randint(2, 40)
            pieces += [word, chosen.choice(_GAPS) * (chosen.randint(2, 9) if chosen.random() < 0.05 else 1)]
        strings.append("".join(pieces if chosen.random() < 0.5 else pieces[:-1]))
    return strings
