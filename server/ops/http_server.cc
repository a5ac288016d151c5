#include "server/ops/http_server.h"

#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/thread.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace bmuf::ops {

struct HttpServer::Events {
  std::map<std::string, Handler> handlers;
  event_base* base = nullptr;
  evhttp* http = nullptr;

  ~Events() {
    if (http != nullptr) evhttp_free(http);
    if (base != nullptr) event_base_free(base);
  }

  static void OnRequest(evhttp_request* request, void* arg) {
    auto* events = static_cast<Events*>(arg);
    const char* path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
    const auto it = events->handlers.find(path == nullptr ? "" : path);
    HttpAnswer answer;
    if (it == events->handlers.end()) {
      answer.code = 404;
      answer.body = "there is: ";
      for (const auto& [known, handler] : events->handlers) absl::StrAppend(&answer.body, known, " ");
      answer.body += "\n";
    } else {
      answer = it->second();
    }
    evkeyvalq* headers = evhttp_request_get_output_headers(request);
    evhttp_add_header(headers, "Content-Type", answer.content_type.c_str());
    evhttp_add_header(headers, "Cache-Control", "no-store");
    evbuffer_add(evhttp_request_get_output_buffer(request), answer.body.data(), answer.body.size());
    evhttp_send_reply(request, answer.code, nullptr, nullptr);
  }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address,
                                                              std::map<std::string, Handler> handlers) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  if (colon == std::string::npos || !absl::SimpleAtoi(address.substr(colon + 1), &port) || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not host:port"));
  }
  const std::string host = address.substr(0, colon);
  evthread_use_pthreads();
  auto events = std::make_unique<Events>();
  events->handlers = std::move(handlers);
  events->base = event_base_new();
  events->http = evhttp_new(events->base);
  // Requests here are a line and some headers; who sends more or slowly is cut off.
  evhttp_set_max_headers_size(events->http, 16 * 1024);
  evhttp_set_max_body_size(events->http, 0);
  evhttp_set_timeout(events->http, 5);
  evhttp_set_allowed_methods(events->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD);
  evhttp_set_gencb(events->http, &Events::OnRequest, events.get());
  evhttp_bound_socket* socket =
      evhttp_bind_socket_with_handle(events->http, host.c_str(), static_cast<uint16_t>(port));
  if (socket == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", std::strerror(errno)));
  }
  sockaddr_storage bound = {};
  socklen_t length = sizeof(bound);
  getsockname(evhttp_bound_socket_get_fd(socket), reinterpret_cast<sockaddr*>(&bound), &length);
  const uint16_t real = bound.ss_family == AF_INET6 ? ntohs(reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port)
                                                    : ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(events), absl::StrCat(host, ":", real)));
  server->thread_ = std::thread([base = server->events_->base] { event_base_loop(base, EVLOOP_NO_EXIT_ON_EMPTY); });
  return server;
}

HttpServer::HttpServer(std::unique_ptr<Events> events, std::string address)
    : events_(std::move(events)), address_(std::move(address)) {}

HttpServer::~HttpServer() {
  event_base_loopexit(events_->base, nullptr);
  thread_.join();
}

}  // namespace bmuf::ops
