#include <cmath>
#include <cstdlib>
#include <limits>

#include "reports/format.h"
#include "tests/namespaces.h"
#include "tests/test.h"

using namespace shardlab;
using namespace shardlab::testing;

TEST_CASE("bytes are shown in powers of 1024 with four digits") {
  CHECK(bytes_text(0) == "0 B");
  CHECK(bytes_text(1023) == "1023 B");
  CHECK(bytes_text(1024) == "1.000 KiB");
  CHECK(bytes_text(1536) == "1.500 KiB");
  CHECK(bytes_text(int64_t{123} << 20) == "123.0 MiB");
  CHECK(bytes_text(int64_t{80} << 30) == "80.00 GiB");
  CHECK(bytes_text(-2048) == "-2.000 KiB");
}

TEST_CASE("rates of bytes are decimal, as data sheets give them") {
  CHECK(bytes_per_second_text(450e9) == "450.0 GB/s");
  CHECK(bytes_per_second_text(3.35e12) == "3.350 TB/s");
  CHECK(bytes_per_second_text(999) == "999 B/s");
  CHECK(bytes_per_second_text(0) == "0 B/s");
}

TEST_CASE("seconds choose their scale") {
  CHECK(seconds_text(0) == "0 s");
  CHECK(seconds_text(1.5) == "1.500 s");
  CHECK(seconds_text(0.0412) == "41.20 ms");
  CHECK(seconds_text(3.1e-6) == "3.100 us");
  CHECK(seconds_text(61e-9) == "61.00 ns");
  CHECK(seconds_text(1e-12) == "0.001 ns");
  CHECK(seconds_text(-0.002) == "-2.000 ms");
}

TEST_CASE("counts, rates, shares and residuals") {
  CHECK(count_text(512) == "512");
  CHECK(count_text(124'400'000) == "124.4 M");
  CHECK(flops_text(3.21e9) == "3.210 Gflop");
  CHECK(flops_text(12) == "12 flop");
  CHECK(tokens_per_second_text(12'345) == "12.35 k tok/s");
  CHECK(percent_text(0.0312) == "3.12 %");
  CHECK(signed_percent_text(2.5) == "+2.50 %");
  CHECK(signed_percent_text(-2.5) == "-2.50 %");
}

TEST_CASE("exact numbers read back as the same double") {
  for (const double v : {0.1, 1.0 / 3, 1e300, 5e-324, 41.2e-3, -0.0, 123456789.123})
    CHECK(std::strtod(number_text(v).c_str(), nullptr) == v);
  CHECK(number_text(std::nan("")) == "nan");
  CHECK(number_text(-std::numeric_limits<double>::infinity()) == "-inf");
}

TEST_CASE("sentences have three digits") {
  CHECK(brief_bytes(int64_t{78} << 30) == "78.0 GiB");
  CHECK(brief_bytes(512) == "512 B");
  CHECK(brief_seconds(55.09) == "55.1 s");
  CHECK(brief_seconds(0.9999) == "1000 ms");
  CHECK(brief_count(1189.6) == "1.19 k");
  CHECK(brief_count(64) == "64");
  CHECK(count_words(70.6e9) == "70.6 billion");
  CHECK(count_words(4194304) == "4.19 million");
  CHECK(count_words(8192) == "8192");
  CHECK(money_text(584'123) == "$584k");
  CHECK(money_text(999'700) == "$1.00M");
  CHECK(money_text(47.2) == "$47");
  CHECK(money_text(3.99) == "$3.99");
  CHECK(brief_percent(0.5406) == "54 %");
}

TEST_CASE("text is broken at blanks, and words stay whole") {
  CHECK(wrapped("one two three", 7) == "one two\nthree");
  CHECK(wrapped("one two three", 9, 2) == "one two\n  three");
  CHECK(wrapped("incomprehensible word", 4) == "incomprehensible\nword");
  CHECK(wrapped("a b", 0) == "a b");
  CHECK(wrapped("waits 6.6 %, then 10 ms more", 9) == "waits\n6.6 %,\nthen\n10 ms\nmore");  // a number stays with its unit
  CHECK(wrapped("of 12 steps", 5) == "of 12\nsteps");
  CHECK(wrapped("a\nb c", 80) == "a\nb c");
}

TEST_CASE("widths count code points and cuts never split one") {
  CHECK(display_width("größe") == 5);
  CHECK(shortened("größe", 5) == "größe");
  CHECK(shortened("größe", 4) == "grö…");
  CHECK(shortened("größe", 1) == "…");
  CHECK(shortened("größe", 0) == "");
}
