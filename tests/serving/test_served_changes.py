"""Models that change while a service is open: no text is of two models, later ones are by the models as they are."""

import threading
from unittest.mock import patch

import pytest
import torch
from http_server import metrics, post, running
from peft import LoraConfig
from serving_cases import held, tiny_llama

from heavypath.speculative import EarlyExit, SpeculativeDecoder
from heavypath.speculative.serving import Closed, ModelChanged

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # of PEFT
    pytest.mark.usefixtures("tried_anew"),
]
VOCAB = 31
PROMPT = [*range(1, 13)]
GREEDY = {"temperature": 0.0, "eos_token_id": None}


def adapted(model):
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter(config, "first")
    with pytest.warns(UserWarning, match="multiple adapters"):
        model.add_adapter(config, "second")


def loaded(model):
    model.load_state_dict(tiny_llama(9, VOCAB).state_dict())


def copied(model):
    other = tiny_llama(9, VOCAB)
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(new)


def given(model):
    for own, new in zip(model.parameters(), tiny_llama(9, VOCAB).parameters(), strict=True):
        own.data = new.data


def copied_unseen(model):
    for own, new in zip(model.parameters(), tiny_llama(9, VOCAB).parameters(), strict=True):
        own.data.copy_(new)


def norm_unseen(model):
    model.model.norm.weight.data.copy_(torch.linspace(-1, 1, 16))


def other_scaling(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["second"] = -3.0


def replaced(model):
    model.model.layers[0].mlp = tiny_llama(9, VOCAB).model.layers[0].mlp


CHANGES = {
    "a state": loaded,
    "in place": copied,
    "other tensors": given,
    "through data": copied_unseen,
    "a norm through data": norm_unseen,
    "another module": replaced,
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda _, args, out: -out),
    "a scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9),
    "an epsilon": lambda model: setattr(model.model.layers[0].post_attention_layernorm, "variance_epsilon", 1e4),
    "a type": lambda model: model.double(),
    "a new adapter": adapted,
}
OF_ADAPTERS = {
    "another adapter": lambda model: model.set_adapter("first"),
    "none": lambda model: model.disable_adapters(),
    "its scaling": other_scaling,
    "its weights": lambda model: model.model.layers[1].mlp.down_proj.lora_A["second"].weight.data.mul_(-4),
}


@pytest.fixture
def model():
    return tiny_llama(1, VOCAB)


def greedy(model, prompt=PROMPT, count=8):
    """transformers' own text."""
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def text(service, prompt=PROMPT, count=8, **more):
    return service.submit(prompt, count, **GREEDY | more).result(60).tokens


def draft_of(kind):
    return {"none": None, "model": tiny_llama(2, VOCAB), "exit": EarlyExit(1)}[kind]


def check(change, model, draft):
    """An unannounced change, between requests and during one."""
    decoder = SpeculativeDecoder(model, draft, "autoregressive" if draft is None else "ersd")
    before = greedy(model)
    with decoder.serve(slots=2, max_tokens=120) as service:
        assert text(service) == before
        with held(service) as entered:
            under_way = service.submit(PROMPT[2:], 100, **GREEDY)
            assert entered.wait(30)
            change(model)
            waiting = service.submit(PROMPT, 8, **GREEDY)
        expected = greedy(model)
        with pytest.raises(ModelChanged, match=r"the target changed while .* submit it again, .*service.paused\(\)"):
            under_way.result(60)
        assert waiting.result(60).tokens == expected
        assert text(service) == expected
        assert text(service, [*PROMPT, 3, 4]) == greedy(model, [*PROMPT, 3, 4])
        assert (service.stats().failed, service.stats().running) == (1, 0)
    return before, expected


@pytest.mark.parametrize("draft", ["none", "model", "exit"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_unannounced_change_ends_what_is_under_way_and_counts_for_all_that_follow(change, draft, model):
    before, expected = check(CHANGES[change], model, draft_of(draft))
    assert (before == expected) == (change == "a type")


@pytest.mark.parametrize("change", OF_ADAPTERS)
def test_adapters_that_are_switched_or_changed(change, model):
    adapted(model)
    model.set_adapter("second")
    before, expected = check(OF_ADAPTERS[change], model, tiny_llama(2, VOCAB))
    assert before != expected


@pytest.mark.parametrize("change", [loaded, given, adapted, replaced])
def test_a_changed_draft_ends_nothing_and_its_rows_are_made_anew(change, model):
    draft = tiny_llama(2, VOCAB)
    with SpeculativeDecoder(model, draft, "ersd").serve(slots=2, max_tokens=120) as service:
        plain = text(service, count=100)
        with held(service) as entered:
            under_way = service.submit(PROMPT, 100, **GREEDY)
            assert entered.wait(30)
            change(draft)
        second = service.submit(PROMPT, 8, **GREEDY).result(60)
        assert under_way.result(60).tokens == plain
        assert second.tokens == plain[:8]
        assert service.submit([*PROMPT, 5], 8, **GREEDY).result(60).tokens == greedy(model, [*PROMPT, 5])
        fresh = SpeculativeDecoder(model, draft, "ersd").generate(torch.tensor([PROMPT]), 8, **GREEDY)
        assert service.submit(PROMPT, 8, **GREEDY, client=None).result(60).steps == fresh.stats.steps


def test_a_draft_that_follows_its_target(model):
    """One is the first layer of the other."""
    before, expected = check(copied, model, EarlyExit(1))
    assert before != expected


@pytest.mark.parametrize("graceful", [True, False])
def test_within_a_pause_nothing_is_decoded_and_all_texts_are_of_one_model(graceful, model):
    old, new = greedy(model, count=100), greedy(tiny_llama(9, VOCAB), count=100)
    with SpeculativeDecoder(model, tiny_llama(2, VOCAB), "ersd").serve(slots=1, max_tokens=120) as service:
        with held(service) as entered:
            under_way = service.submit(PROMPT, 100, **GREEDY)
            assert entered.wait(30)
            waiting = service.submit(PROMPT, 100, **GREEDY)
            changed = threading.Event()

            def change():
                with service.paused(graceful), service.paused():
                    assert under_way.done()
                    assert not waiting.done()
                    copied_unseen(model)
                    changed.set()

            changing = threading.Thread(target=change)
            changing.start()
        changing.join(60)
        assert changed.is_set()
        done = under_way.result(60)
        assert done.tokens == old[: len(done.tokens)]
        assert (done.reason, len(done.tokens) == 100) == (("length", True) if graceful else ("cancelled", False))
        assert waiting.result(60).tokens == new
        assert (service.stats().failed, waiting.result().reused_tokens) == (0, 0)


def test_a_pause_forgets_what_nobody_could_see(model):
    """One element that no look meets."""
    with SpeculativeDecoder(model, method="autoregressive").serve(slots=1, max_tokens=64) as service:
        text(service)
        with service.paused():
            model.model.embed_tokens.weight.data[PROMPT[3], 7] += 30
        done = service.submit(PROMPT, 8, **GREEDY).result(60)
        assert (done.reused_tokens, done.tokens) == (0, greedy(model))


def test_a_pause_waits_no_longer_than_it_is_told(model):
    with SpeculativeDecoder(model, method="autoregressive").serve(slots=1, max_tokens=120) as service:

        def slow(ids, scores, wait=threading.Event()):  # noqa: B008 - one for all calls
            wait.wait(0.02)
            return False

        under_way = service.submit(PROMPT, 100, **GREEDY, stopping_criteria=[slow])
        next(iter(under_way))
        with service.paused(timeout=0.01):
            assert under_way.result(0).reason == "cancelled"
        assert text(service) == greedy(model)


def test_pauses_take_turns_and_end_with_the_service(model):
    service = SpeculativeDecoder(model, method="autoregressive").serve(slots=1, max_tokens=64)
    inside, most = [], []

    def pause():
        for _ in range(5):
            with service.paused():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    sent = [service.submit(PROMPT, 8, **GREEDY) for _ in range(5)]
    for thread in threads:
        thread.join(60)
    assert {*most} == {1}
    assert [each.result(60).tokens for each in sent] == 5 * [greedy(model)]
    with service.paused(), pytest.raises(RuntimeError, match="cannot be closed within a pause of the same thread"):
        service.close()
    service.close()
    with pytest.raises(Closed):
        service.paused()


def test_a_model_that_cannot_be_decoded_is_said_to_each_request_until_it_can(model):
    with SpeculativeDecoder(model, method="autoregressive").serve(slots=1, max_tokens=64) as service:
        expected = text(service)
        model.train()
        for _ in range(2):
            with pytest.raises(ModelChanged, match="cannot be decoded as they are now: target is in training mode"):
                text(service)
        model.eval()
        assert text(service) == expected


def test_two_services_of_one_model_and_generate_beside_them(model):
    decoder = SpeculativeDecoder(model, tiny_llama(2, VOCAB), "ersd")
    other = SpeculativeDecoder(model, method="autoregressive")
    with decoder.serve(slots=2, max_tokens=64) as one, other.serve(slots=2, max_tokens=64) as two:
        for change in (lambda model: None, copied, replaced, norm_unseen):
            change(model)
            expected = greedy(model)
            assert decoder.generate(torch.tensor([PROMPT]), 8, **GREEDY).sequences[0, 12:].tolist() == expected
            assert text(one) == text(two) == text(one) == expected


def test_what_transformers_leaves_behind_is_no_change(model):
    """It registers hooks for good when it is asked for hidden states for the first time."""
    with SpeculativeDecoder(model, method="autoregressive").serve(slots=1, max_tokens=120) as service:
        with held(service) as entered:
            under_way = service.submit(PROMPT, 100, **GREEDY)
            assert entered.wait(30)
            with torch.no_grad():
                model(torch.tensor([PROMPT]), output_hidden_states=True)
            greedy(model)
        assert under_way.result(60).tokens == greedy(model, count=100)


def test_looks_are_few(model):
    """A step costs no look at all modules: those come when a text begins or ends while nothing else runs."""
    with SpeculativeDecoder(model, method="autoregressive").serve(slots=2, max_tokens=120) as service:
        looks, target = [], service._models._of_target
        thorough, is_alike = target._is_the_same, target._is_alike
        with (
            patch.object(target, "_is_the_same", lambda: looks.append("thorough") or thorough()),
            patch.object(target, "_is_alike", lambda: looks.append("quick") or is_alike()),
        ):
            text(service, count=100)
        steps = service.stats().batch_steps
    assert looks.count("thorough") == 1
    assert looks.count("quick") <= 2 + steps // 16


def test_over_http_requests_under_way_get_a_clear_error_and_the_next_ones_text(demo_pair):
    tokenizer, tokens = demo_pair.tokenizer, len(demo_pair.tokenizer)
    model = tiny_llama(1, tokens)
    decoder = SpeculativeDecoder(model, method="autoregressive")
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    with decoder.serve(slots=2, max_tokens=120) as service, running(service, tokenizer) as base:
        answers = []
        with held(service) as entered:
            asking = threading.Thread(target=lambda: answers.append(post(base, body)))
            asking.start()
            assert entered.wait(30)
            model.load_state_dict(tiny_llama(9, tokens).state_dict())
        asking.join(60)
        ((status, error),) = answers
        assert (status, error["code"], error["type"]) == (503, "model_changed", "server_error")
        assert "submit it again" in error["message"]
        status, answer = post(base, body | {"max_tokens": 6})
        assert status == 200
        assert answer["choices"][0]["text"] == tokenizer.decode(greedy(model, count=6))
        assert metrics(base)["heavypath_completions_total{outcome=failed}"] == 1
