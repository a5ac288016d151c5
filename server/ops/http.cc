#include "server/ops/http.h"

#include <arpa/inet.h>
#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/thread.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace bmuf::ops {
namespace {

// A scraper sends a line and a few headers.
constexpr int kMostHeaderBytes = 8192;
constexpr int kIdleSeconds = 10;

}  // namespace

absl::StatusOr<HostPort> ParseHostPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort parsed;
  bool good = colon != std::string::npos && colon > 0 && absl::SimpleAtoi(address.substr(colon + 1), &parsed.port) &&
              parsed.port >= 0 && parsed.port <= 65535;
  if (good) {
    parsed.host = address.substr(0, colon);
    if (parsed.host.front() == '[' && parsed.host.back() == ']') {
      parsed.host = parsed.host.substr(1, parsed.host.size() - 2);
    } else {
      good = !absl::StrContains(parsed.host, ":");
    }
  }
  if (!good) return absl::InvalidArgumentError(absl::StrCat("\"", address, "\" is not of the form host:port"));
  return parsed;
}

bool IsLoopback(const std::string& host) {
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  if (inet_pton(AF_INET6, host.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost";
}

struct HttpServer::Library {
  event_base* base = nullptr;
  evhttp* http = nullptr;
  Handlers handlers;

  ~Library() {
    if (http != nullptr) evhttp_free(http);
    if (base != nullptr) event_base_free(base);
  }

  static void Handle(evhttp_request* request, void* self) {
    auto* library = static_cast<Library*>(self);
    const evhttp_uri* uri = evhttp_request_get_evhttp_uri(request);
    const char* path = uri == nullptr ? nullptr : evhttp_uri_get_path(uri);
    const auto it = library->handlers.find(path == nullptr || *path == '\0' ? "/" : path);
    HttpAnswer answer;
    if (it == library->handlers.end()) {
      answer.code = 404;
      answer.body = "not here\n";
    } else {
      answer = it->second();
    }
    evkeyvalq* headers = evhttp_request_get_output_headers(request);
    evhttp_add_header(headers, "Content-Type", answer.content_type.c_str());
    evhttp_add_header(headers, "Cache-Control", "no-store");
    evbuffer* body = evbuffer_new();
    evbuffer_add(body, answer.body.data(), answer.body.size());
    evhttp_send_reply(request, answer.code, answer.code == 200 ? "OK" : "No", body);
    evbuffer_free(body);
  }
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address, Handlers handlers) {
  absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok()) return parsed.status();
  evthread_use_pthreads();
  auto library = std::make_unique<Library>();
  library->handlers = std::move(handlers);
  library->base = event_base_new();
  library->http = library->base == nullptr ? nullptr : evhttp_new(library->base);
  if (library->http == nullptr) return absl::InternalError("libevent cannot start");
  evhttp_set_allowed_methods(library->http, EVHTTP_REQ_GET | EVHTTP_REQ_HEAD);
  evhttp_set_max_headers_size(library->http, kMostHeaderBytes);
  evhttp_set_max_body_size(library->http, 0);
  evhttp_set_timeout(library->http, kIdleSeconds);
  evhttp_set_gencb(library->http, &Library::Handle, library.get());
  evhttp_bound_socket* bound =
      evhttp_bind_socket_with_handle(library->http, parsed->host.c_str(), static_cast<uint16_t>(parsed->port));
  if (bound == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", std::strerror(errno)));
  }
  sockaddr_storage name;
  socklen_t size = sizeof(name);
  if (getsockname(evhttp_bound_socket_get_fd(bound), reinterpret_cast<sockaddr*>(&name), &size) != 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", std::strerror(errno)));
  }
  const uint16_t port = ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                                         : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
  const bool v6 = absl::StrContains(parsed->host, ":");
  return std::unique_ptr<HttpServer>(new HttpServer(
      std::move(library), v6 ? absl::StrCat("[", parsed->host, "]:", port) : absl::StrCat(parsed->host, ":", port)));
}

HttpServer::HttpServer(std::unique_ptr<Library> library, std::string address)
    : library_(std::move(library)), address_(std::move(address)) {
  thread_ = std::thread([base = library_->base] { event_base_loop(base, EVLOOP_NO_EXIT_ON_EMPTY); });
}

HttpServer::~HttpServer() {
  event_base_loopbreak(library_->base);
  thread_.join();
}

}  // namespace bmuf::ops
