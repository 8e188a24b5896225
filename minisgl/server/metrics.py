"""Prometheus metrics, under names that users' dashboards know."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

GAUGES = {
    "num_requests_running": ("running", "Requests that are being computed."),
    "num_requests_waiting": ("waiting", "Requests in the queue."),
    "num_requests_draining": ("draining", "Ended requests whose last step has not completed."),
    "kv_pages_free": ("pages_free", "KV pages that hold nothing."),
    "kv_pages_cached": ("pages_cached", "KV pages of the prefix cache that no request uses."),
    "kv_pages_used": ("pages_used", "KV pages of requests."),
    "gen_throughput": ("tokens_per_s", "Output tokens per second, over the last seconds."),
}
SUMS = {
    "prompt_tokens_total": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens_total": ("output_tokens", "Output tokens."),
    "prefix_cache_hit_tokens_total": ("prefix_hit_tokens", "Prompt tokens taken from the prefix cache."),
    "num_preemptions_total": ("preemptions", "Requests that made room for others."),
}
LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._values = {  # sums are the engine's own, so they are set like gauges
            name: Gauge(f"minisgl:{name}", text, registry=self._registry)
            for name, (_, text) in {**GAUGES, **SUMS}.items()
        }
        self._usage = Gauge("minisgl:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", registry=self._registry)
        self.replies = Counter(
            "minisgl:http_replies", "Requests that ended, by status.", ["status"], registry=self._registry
        )
        self.first_token = Histogram(
            "minisgl:time_to_first_token_seconds",
            "From the whole request to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )
        self.loop_lag = Histogram(
            "minisgl:event_loop_lag_seconds",
            "How late the server's event loop ran what was due.",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    def render(self, stats: dict[str, int | float]) -> bytes:
        """The text of all metrics.

        Args:
            stats: from `LLM.stats`.
        """
        for name, (key, _) in {**GAUGES, **SUMS}.items():
            self._values[name].set(stats[key])
        num_pages = stats["pages_free"] + stats["pages_cached"] + stats["pages_used"]
        self._usage.set(stats["pages_used"] / max(num_pages, 1))
        return generate_latest(self._registry)
