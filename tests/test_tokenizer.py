"""Small tokenizers, end-of-text ids, chat templates: all by value."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rl.errors import MeshdialError
from rl.models.tokenizer import Tokenizer, byte_tokenizer_files, character_tokenizer_files

CHAT = [{"role": "user", "content": "2+2?"}]


def write(folder: Path, files: dict[str, bytes], **settings) -> Path:
    """The files in a folder, with some of tokenizer_config.json's settings replaced."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    config = json.loads(files["tokenizer_config.json"]) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("bytes"), byte_tokenizer_files()))


def test_bytes_are_their_own_tokens(byte_tokenizer):
    assert byte_tokenizer.encode("Aé\n") == [0x41, 0xC3, 0xA9, 0x0A]
    assert byte_tokenizer.encode("1<eos>") == [0x31, 258]
    assert byte_tokenizer.decode([0x31, 258, 256]) == "1"
    assert byte_tokenizer.decode([0x31, 258], skip_special=False) == "1<eos>"
    assert (byte_tokenizer.num_ids, byte_tokenizer.pad_id) == (259, 256)
    assert byte_tokenizer.eos_ids == (258,)


@given(text=st.text())
def test_bytes_round_trip_any_text(byte_tokenizer, text):
    if not any(special in text for special in ("<pad>", "<bos>", "<eos>")):
        tokens = byte_tokenizer.encode(text)
        assert tokens == list(text.encode())
        assert byte_tokenizer.decode(tokens) == text


def test_characters_are_numbered_in_the_alphabets_order(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, character_tokenizer_files("ba \n3")))
    assert tokenizer.encode("ab\n 3\n") == [1, 0, 3, 2, 4, 3]
    assert tokenizer.decode([1, 0, 3, 2, 4, 7]) == "ab\n 3"
    assert (tokenizer.num_ids, tokenizer.pad_id, tokenizer.eos_ids) == (8, 5, (7,))
    with pytest.raises(MeshdialError, match="cannot encode 'ab7': it has no token for '7'"):
        tokenizer.encode("ab7")


@pytest.mark.parametrize("alphabet, found", [("abca", "a repeated 'a'"), ("", "no character")])
def test_an_alphabet_must_hold_each_character_once(alphabet, found):
    with pytest.raises(MeshdialError, match=f"alphabet: found {found}"):
        character_tokenizer_files(alphabet)


def test_eos_ids_are_the_union_of_all_places_that_name_one(tmp_path):
    write(tmp_path, byte_tokenizer_files(), eos_token={"content": "A", "special": True})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 3]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "pad_token_id": 4}')
    assert Tokenizer.load(tmp_path).eos_ids == (3, 7, 9, 65)


def test_padding_falls_back_from_token_to_id_to_eos(tmp_path):
    write(tmp_path, byte_tokenizer_files(), pad_token="B")
    (tmp_path / "config.json").write_text('{"pad_token_id": 4}')
    assert Tokenizer.load(tmp_path).pad_id == 66
    write(tmp_path, byte_tokenizer_files(), pad_token=None)
    (tmp_path / "generation_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path).pad_id == 4
    (tmp_path / "config.json").unlink()
    assert Tokenizer.load(tmp_path).pad_id == 258


def test_saved_truncation_and_padding_are_switched_off(tmp_path):
    write(tmp_path, byte_tokenizer_files())
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert backend.encode("abcd").ids == [97, 98] + [0] * 6
    assert Tokenizer.load(tmp_path).encode("abcd") == [97, 98, 99, 100]


def test_only_plain_text_gets_the_post_processors_tokens(tmp_path):
    write(tmp_path, byte_tokenizer_files(), chat_template="{{ bos_token }}hi")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 257)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hi") == [257, 104, 105]
    assert tokenizer.encode_chat(CHAT) == [257, 104, 105]


def template(tmp_path, text) -> Tokenizer:
    return Tokenizer.load(write(tmp_path, byte_tokenizer_files(), chat_template=text))


def test_a_chat_is_rendered_with_the_assistants_turn_opened(tmp_path):
    text = (
        "{{ bos_token }}\n{% for m in messages %}\n  {% if loop.index > 9 %}{% break %}{% endif %}"
        "[{{ m.role }}] {{ m['content'] | tojson }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}[assistant]{% generation %} {% endgeneration %}{% endif %}"
        "{% if strftime_now is defined %}today{% endif %}{% if tools %}tools{% endif %}"
    )
    chat = [{"role": "system", "content": "é<"}, *CHAT]
    rendered = template(tmp_path, text).render_chat(chat)
    assert rendered == '<bos>\n[system] "é<"\n[user] "2+2?"\n[assistant] '


def test_a_template_file_goes_before_the_setting_and_default_before_others(tmp_path):
    both = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "plain"}]
    tokenizer = template(tmp_path, both)
    assert tokenizer.render_chat(CHAT) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "file"
    assert Tokenizer.load(tmp_path).template_hash != tokenizer.template_hash


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content + 1 }}", "concatenate str"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_may_not_do_is_told(tmp_path, text, reason):
    with pytest.raises(MeshdialError, match=f"chat template of .* refuses this chat: .*{reason}"):
        template(tmp_path, text).render_chat(CHAT)


def test_a_chat_without_a_template_is_refused(byte_tokenizer):
    assert byte_tokenizer.template_hash is None
    with pytest.raises(MeshdialError, match=r"has no chat template .* must be plain text"):
        byte_tokenizer.render_chat(CHAT)


def test_the_content_hash_tells_tokenizers_apart(tmp_path, byte_tokenizer):
    write(tmp_path, byte_tokenizer_files())
    assert Tokenizer.load(tmp_path).content_hash == byte_tokenizer.content_hash
    pretty = json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()), indent=7)
    (tmp_path / "tokenizer.json").write_text(pretty)
    assert Tokenizer.load(tmp_path).content_hash == byte_tokenizer.content_hash
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.load(tmp_path).content_hash != byte_tokenizer.content_hash
    write(tmp_path, character_tokenizer_files("ab"))
    assert Tokenizer.load(tmp_path).content_hash != byte_tokenizer.content_hash


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(MeshdialError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(MeshdialError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.load(tmp_path)
    write(tmp_path, byte_tokenizer_files())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(MeshdialError, match=r"tokenizer_config\.json cannot be read as JSON"):
        Tokenizer.load(tmp_path)
