# What Ray and Ray Serve of a cluster of yours read from the environment (docs/deploy.md says why). On every node, in the
# environment that mars-ray is installed in, before `ray start`:
#   . serve_configs/cluster.sh
export RAY_AUTH_MODE=token
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0
export RAY_SERVE_ENABLE_HA_PROXY=1
export RAY_SERVE_THROUGHPUT_OPTIMIZED=1
export RAY_SERVE_HAPROXY_BINARY_PATH="$(command -v mars-ray-haproxy)"
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=0.25
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30
