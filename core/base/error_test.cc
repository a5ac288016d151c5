#include "core/base/error.h"

#include <set>
#include <string>

#include "core/base/names.h"
#include "gtest/gtest.h"

namespace bmuf {
namespace {

TEST(ErrorTest, EveryReasonHasAStatusCodeOfItsOwnChoice) {
  std::set<absl::StatusCode> codes;
  for (int i = 0; i < v1::Reason_descriptor()->value_count(); ++i) {
    const auto* value = v1::Reason_descriptor()->value(i);
    const auto reason = static_cast<v1::Reason>(value->number());
    EXPECT_TRUE(value->options().HasExtension(v1::status_code)) << value->name();
    EXPECT_NE(CodeOf(reason), absl::StatusCode::kOk) << value->name();
    codes.insert(CodeOf(reason));
  }
  EXPECT_GE(codes.size(), 10u);
  EXPECT_EQ(CodeOf(v1::REASON_STALE_ROUND), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(CodeOf(v1::REASON_RECOVERING), absl::StatusCode::kUnavailable);
}

TEST(ErrorTest, SurvivesTheWire) {
  absl::Status sent = Error(v1::REASON_STALE_ROUND, "round 7 is over")
                          .With("round", 8)
                          .With("version", 7)
                          .RetryAfter(absl::Milliseconds(1500))
                          .Field("round", "over");
  absl::Status got = FromRpcStatus(ToRpcStatus(sent));
  EXPECT_EQ(got, sent);
  EXPECT_EQ(got.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(got), v1::REASON_STALE_ROUND);
  EXPECT_EQ(MetadataOf(got, "round"), "8");
  EXPECT_EQ(MetadataOf(got, "version"), "7");
  EXPECT_EQ(MetadataOf(got, "absent"), "");
  EXPECT_EQ(RetryDelayOf(got), absl::Milliseconds(1500));
}

TEST(ErrorTest, ForeignOrHostileDetailsHaveNoReason) {
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), v1::REASON_UNSPECIFIED);
  google::rpc::Status rpc;
  rpc.set_code(9);
  auto* any = rpc.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value("\xff\xff not a message");
  EXPECT_EQ(ReasonOf(FromRpcStatus(rpc)), v1::REASON_UNSPECIFIED);
  rpc.set_code(4711);
  EXPECT_EQ(FromRpcStatus(rpc).code(), absl::StatusCode::kUnknown);
}

TEST(NamesTest, AcceptsWhatIsSafeAsAPathAndALabel) {
  for (const char* name : {"a", "node3", "lm-1.3B_run.7", "0"}) EXPECT_TRUE(ValidateName("job", name).ok()) << name;
  EXPECT_TRUE(ValidateName("job", std::string(64, 'x')).ok());
}

TEST(NamesTest, RefusesTheRestWithTheFieldNamed) {
  for (const std::string& name : {std::string(), std::string("."), std::string("a/b"), std::string("../x"),
                                  std::string("a..b"), std::string("-a"), std::string("a-"), std::string("a\nb"),
                                  std::string("a\0b", 3), std::string("\xc3\xa4"), std::string(65, 'x')}) {
    absl::Status status = ValidateName("worker", name);
    EXPECT_EQ(ReasonOf(status), v1::REASON_INVALID_NAME) << name;
    EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
    EXPECT_NE(status.message().find("worker"), absl::string_view::npos);
  }
}

TEST(NamesTest, EscapesWhatCouldForgeOrHideALogLine) {
  EXPECT_EQ(EscapeForLog("plain \xc3\xa4"), "plain \xc3\xa4");
  EXPECT_EQ(EscapeForLog("a\nb\x1b[31m"), "a\\x0ab\\x1b[31m");
  EXPECT_EQ(EscapeForLog("\xe2\x80\xae"), "\\xe2\\x80\\xae");         // Right-to-left override.
  EXPECT_EQ(EscapeForLog("\xc0\x80\xff"), "\\xc0\\x80\\xff");         // Overlong and invalid.
  EXPECT_EQ(EscapeForLog("\xed\xa0\x80"), "\\xed\\xa0\\x80");         // Surrogate.
  EXPECT_EQ(EscapeForLog(std::string(1'000'000, 'y')).size(), 259u);  // Cut, with dots.
}

}  // namespace
}  // namespace bmuf
