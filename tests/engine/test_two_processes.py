"""Two chatkv on one conversation: what the second says becomes a fork, and it is told so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from program import PROMPTS, Program, say

ROOT = Path(__file__).parents[2]
OTHER = """
import sys
from pathlib import Path
from sessions.store import ChatStore

store = ChatStore(Path(sys.argv[1]))
row = store.find("shared")
begun = store.begin_turn(row.id, row.head_turn_id, row.head_turn_id, "from elsewhere", {})
print("begun", flush=True)
sys.stdin.readline()
store.finish_turn(begun.turn_id, "done", "at last")
store.close()
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_turn_that_another_process_is_answering_is_not_gone_on_from(tmp_path: Path) -> None:
    """Two real processes: the second becomes a fork, told so, whenever it comes."""
    tmp_path.chmod(0o700)
    program = Program(tmp_path)
    early = program.chats.new("shared")
    say(early, PROMPTS[0])
    path = str(tmp_path / "chat.db")
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, path], stdin=-1, stdout=-1, text=True, cwd=ROOT
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        late = program.chats.open("shared")  # opened while the other one is answering
        assert [turn.state for turn in late.turns()] == ["done", "open"]
        for chat in (late, early):
            done = say(chat, PROMPTS[1])
            assert "Another chatkv" in done.notice
            assert "fork" in done.notice
            assert [turn.prompt for turn in chat.turns()] == PROMPTS[:2]
            assert chat.fork_name.startswith("fork-")
        third = program.chats.open("shared")
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "done\n"
        done = say(third, PROMPTS[1])  # it was open when we looked, and is whole by now
        assert done.notice == ""
        assert [turn.prompt for turn in third.turns()] == [
            PROMPTS[0], "from elsewhere", PROMPTS[1]
        ]  # fmt: skip
        other.stdin.write("\n")
    main = program.store.path(program.store.find("shared:main").id)
    assert [turn.message("user").row.content for turn in main[1:]] == [  # type: ignore[union-attr]
        PROMPTS[0], "from elsewhere", PROMPTS[1]
    ]  # fmt: skip
    program.close()
