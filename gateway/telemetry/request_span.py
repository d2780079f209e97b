"""The span of one generating request, with the attributes of OpenTelemetry's conventions for HTTP and for generative
AI. Texts of prompts and answers are never among them."""

from __future__ import annotations

from opentelemetry.trace import StatusCode

from draftwood.errors import DraftwoodError
from draftwood.telemetry.tracing import Tracing, traceparent_of
from gateway.generation.outcome import Outcome
from gateway.generation.plan import Plan

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
PROVIDER = "draftwood"


class RequestSpan:
    """From the request's arrival to the last byte of its answer."""

    def __init__(self, tracing: Tracing, route: str, request_id: str, traceparent: str) -> None:
        self._operation = OPERATIONS[route]
        self._outcomes: list[Outcome] = []
        self._span = tracing.span(
            f"POST {route}",
            traceparent,
            is_server=True,
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "draftwood.request_id": request_id,
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": PROVIDER,
            },
        )

    @property
    def traceparent(self) -> str:
        """What the verify service is told."""
        return traceparent_of(self._span)

    def named(self, response_id: str, model: str) -> None:
        """The model that answers, and the response's id."""
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attributes(
            {"gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": response_id}
        )

    def planned(self, plan: Plan) -> None:
        """The request with its defaults."""
        options = plan.choices[0].options
        sampling = options.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.max_tokens": options.max_new_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.usage.input_tokens": sum(plan.prompt_lengths),
                **({"gen_ai.request.choice.count": len(plan.choices)} if len(plan.choices) > 1 else {}),
                **({"gen_ai.request.top_k": sampling.top_k} if sampling.top_k else {}),
            }
        )
        if plan.seed < 2**63:  # an attribute holds no more
            self._span.set_attribute("gen_ai.request.seed", plan.seed)

    def first_text(self, seconds: float) -> None:
        """The response has its first text, so long after the request's arrival."""
        self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def ended(self, outcome: Outcome) -> None:
        """One of the request's answers has ended."""
        self._outcomes.append(outcome)

    def failed(self, error: DraftwoodError) -> None:
        """It ends with an error."""
        self._span.set_attribute("error.type", error.reason)

    def end(self, status: int, *, is_stream: bool) -> None:
        """Nothing more will be sent."""
        outcomes = self._outcomes
        self._span.set_attributes({"http.response.status_code": status, "gen_ai.request.stream": is_stream})
        if outcomes:
            stats = [outcome.stats for outcome in outcomes]
            self._span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": [outcome.finish_reason for outcome in outcomes],
                    "gen_ai.usage.output_tokens": sum(outcome.num_tokens for outcome in outcomes),
                    "draftwood.steps": sum(entry.num_steps for entry in stats),
                    "draftwood.drafted_tokens": sum(entry.num_drafted_tokens for entry in stats),
                    "draftwood.accepted_tokens": sum(entry.num_accepted_tokens for entry in stats),
                }
            )
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
