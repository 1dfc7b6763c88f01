# Set the environment of Ray and Ray Serve on your own cluster (docs/deploy.md explains it). Run on every node, in the
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
# HAProxy's configuration and admin socket, for this user alone; sockets need a short path.
_folder="/tmp/mars-ray-$(id -u)"
mkdir -p -m 700 "$_folder"
export RAY_SERVE_HAPROXY_CONFIG_FILE_LOC="$_folder/haproxy.cfg"
export RAY_SERVE_HAPROXY_SOCKET_PATH="$_folder/admin.sock"
export RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH="$_folder/metrics.sock"
export RAY_SERVE_HAPROXY_SERVER_STATE_BASE="$_folder"
export RAY_SERVE_HAPROXY_SERVER_STATE_FILE="$_folder/server-state"
# TLS towards callers: the same files on every node, the key readable by this user alone.
# export MARS_RAY_TLS_CERTFILE=/etc/mars-ray/tls.crt
# export MARS_RAY_TLS_KEYFILE=/etc/mars-ray/tls.key
