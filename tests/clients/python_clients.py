"""What clients in Python do with the server; `run.py` calls it in their environment: python_clients.py CLIENT BASE."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "heavypath-demo"
QUESTION = [{"role": "user", "content": "def read_lines(path):"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "read_file", "description": "Reads.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}


def openai(base: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=base, api_key="any", max_retries=0)
    chat = client.chat.completions
    plain = chat.create(model=NAME, messages=QUESTION, temperature=0)
    streamed = chat.create(model=NAME, messages=QUESTION, temperature=0, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == plain.choices[0].message.content
    scored = chat.create(model=NAME, messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=3)
    assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 3
    called = chat.create(model=NAME, messages=QUESTION, tools=[TOOL], tool_choice="required", max_tokens=200)
    call = called.choices[0].message.tool_calls[0]
    answered = [*QUESTION, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    assert chat.create(model=NAME, messages=answered, tools=[TOOL], max_tokens=4).usage.completion_tokens <= 4
    bias = {"logit_bias": {"5": -100}, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    assert client.completions.create(model=NAME, prompt="import os", max_tokens=8, logprobs=2, echo=True, **bias)
    assert json.loads(
        chat.create(model=NAME, messages=QUESTION, response_format=FORM, max_tokens=200).choices[0].message.content
    )


def litellm(base: str) -> None:
    import litellm

    for provider in ("openai", "hosted_vllm"):
        options = {"model": f"{provider}/{NAME}", "api_base": base, "api_key": "any", "messages": QUESTION}
        assert litellm.completion(**options, max_tokens=8).usage.completion_tokens <= 8
        assert list(litellm.completion(**options, max_tokens=8, stream=True))
        called = litellm.completion(**options, tools=[TOOL], tool_choice="required", max_tokens=200)
        assert called.choices[0].message.tool_calls[0].function.name == "read_file"


def langchain(base: str) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel, Field

    class Size(BaseModel):
        size: int = Field(ge=0, le=99)

    @tool(args_schema=Size)
    def read_file(size: int) -> str:
        """Read a file."""
        return size * "a"

    model = ChatOpenAI(model=NAME, base_url=base, api_key="any", max_tokens=200, temperature=0)
    assert isinstance(model.invoke("class Stack:").content, str)
    assert list(model.stream("class Stack:"))
    called = model.bind_tools([read_file], tool_choice="any").invoke("class Stack:")
    assert called.tool_calls[0]["name"] == "read_file"
    assert isinstance(model.bind_tools([read_file]).invoke("class Stack:").content, str)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Size, method=method).invoke("class Stack:").size, int)
    assert OpenAI(model=NAME, base_url=base, api_key="any", max_tokens=8, best_of=2).invoke("import os")


def llm(base: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        models = [
            {"model_id": "chat", "model_name": NAME, "api_base": base, "supports_tools": True, "supports_schema": True},
            {"model_id": "text", "model_name": NAME, "api_base": base, "completion": True},
        ]
        (Path(home) / "extra-openai-models.yaml").write_text(json.dumps(models))

        def ask(*arguments: str) -> str:
            command = [str(Path(sys.executable).with_name("llm")), *arguments]
            environment = {"LLM_USER_PATH": home, "PATH": "/usr/bin:/bin", "OPENAI_API_KEY": "any", "HOME": home}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert ask("-m", "chat", "def f(x):", "-o", "max_tokens", "8")
        assert ask("-m", "text", "def f(x):", "-o", "max_tokens", "8")
        assert json.loads(ask("-m", "chat", "class Stack:", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "200"))
        assert ask("-m", "chat", "-T", "llm_version", "class Stack:", "-o", "max_tokens", "8") is not None


def lm_eval(base: str) -> None:
    """A loglikelihood and a generate task; accuracy is that of the target by hand in the first."""
    here = Path(__file__).parent
    tokenizer = here.parents[1] / "speculative" / "demo"
    for kind, path, tasks in (
        ("local-completions", "completions", "own_choices,own_text"),
        ("local-chat-completions", "chat/completions", "own_text"),
    ):
        arguments = f"model={NAME},base_url={base}/{path},tokenizer={tokenizer},num_concurrent=2,max_length=1000"
        with tempfile.TemporaryDirectory() as out:
            command = [
                str(Path(sys.executable).with_name("lm_eval")), "run", "--model", kind, "--model_args", arguments,
                "--tasks", tasks, "--include_path", str(here / "tasks"), "--output_path", out,
            ]  # fmt: skip
            command += ["--apply_chat_template"] if "chat" in kind else []
            done = subprocess.run(command, cwd=here, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            (file,) = Path(out).rglob("results*.json")
            results = json.loads(file.read_text())["results"]
        assert results.keys() == {*tasks.split(",")}, results
        if "own_choices" in results:
            assert results["own_choices"]["acc,none"] == 1.0, results


def guidellm(base: str) -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as out:
        tokenizer = here.parents[1] / "speculative" / "demo"
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={base.removesuffix('/v1')},model={NAME}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=24",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--output", f"kind=json,path={Path(out) / 'report.json'}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=out)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        (report,) = json.loads((Path(out) / "report.json").read_text())["benchmarks"]
    totals = report["metrics"]["request_totals"]
    assert totals["successful"] == 24, totals


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
