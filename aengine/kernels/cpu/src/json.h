// A text in JSON, read where it is: strings, and how far values go. Knows nothing of what values mean.
#pragma once

#include <string>
#include <vector>

#include "abi.h"

namespace aengine {

// A place in a JSON text. Functions return false for what is no JSON; most of what lies outside of strings is taken as it is.
struct Json {
  const char* at;
  const char* end;

  void space() {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
  }
  bool take(char wanted) {
    space();
    if (at == end || *at != wanted) return false;
    at++;
    return true;
  }
  bool hex(u32& value) {
    if (end - at < 4) return false;
    value = 0;
    for (i32 digit = 0; digit < 4; digit++, at++) {
      const char c = *at;
      const i32 number = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
      if (number < 0) return false;
      value = value * 16 + number;
    }
    return true;
  }
  bool number(i64& value) {
    space();
    const char* begin = at;
    for (value = 0; at < end && *at >= '0' && *at <= '9' && at - begin < 10; at++) value = value * 10 + (*at - '0');
    return at > begin;
  }
  // A string goes to the end of `out`.
  bool string(std::vector<char>& out);
  bool skip_string();
  bool skip_value();
};

// Writes a character; returns its bytes.
inline i32 utf8(u32 point, char* out) {
  const i32 size = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
  for (i32 byte = size - 1; byte > 0; byte--, point >>= 6) out[byte] = (char)(0x80 | (point & 63));
  static const u8 marks[] = {0, 0, 0xC0, 0xE0, 0xF0};
  out[0] = (char)(marks[size] | point);
  return size;
}

inline bool Json::string(std::vector<char>& out) {
  if (!take('"')) return false;
  while (at < end) {
    const char* plain = at;
    while (at < end && *at != '"' && *at != '\\') at++;
    out.insert(out.end(), plain, at);
    if (at == end) return false;
    if (*at++ == '"') return true;
    if (at == end) return false;
    u32 point;
    switch (*at++) {
      case '"': point = '"'; break;
      case '\\': point = '\\'; break;
      case '/': point = '/'; break;
      case 'b': point = '\b'; break;
      case 'f': point = '\f'; break;
      case 'n': point = '\n'; break;
      case 'r': point = '\r'; break;
      case 't': point = '\t'; break;
      case 'u': {
        if (!hex(point)) return false;
        if (point >= 0xD800 && point < 0xE000) {  // the first of two
          u32 second;
          if (point >= 0xDC00 || end - at < 6 || at[0] != '\\' || at[1] != 'u') return false;
          at += 2;
          if (!hex(second) || second < 0xDC00 || second >= 0xE000) return false;
          point = 0x10000 + ((point - 0xD800) << 10) + (second - 0xDC00);
        }
        break;
      }
      default: return false;
    }
    char bytes[4];
    out.insert(out.end(), bytes, bytes + utf8(point, bytes));
  }
  return false;
}

inline bool Json::skip_string() {
  if (!take('"')) return false;
  for (; at < end; at++) {
    if (*at == '"') return at++, true;
    if (*at == '\\') at++;
  }
  return false;
}

inline bool Json::skip_value() {
  i64 depth = 0;
  do {
    space();
    if (at >= end) return false;
    if (*at == '"') {
      if (!skip_string()) return false;
    } else if (*at == '{' || *at == '[') {
      depth++, at++;
    } else if (*at == '}' || *at == ']') {
      depth--, at++;
    } else if (*at == ',' || *at == ':') {
      if (!depth) return false;
      at++;
    } else {
      static const std::string others = ",:{}[]\" \n\r\t";
      const char* begin = at;
      while (at < end && others.find(*at) == std::string::npos) at++;
      if (at == begin) return false;
    }
    if (depth < 0) return false;
  } while (depth);
  return true;
}

// Calls with the key of each value of an object; the call goes over the value.
template <class Value>
bool for_each_key(Json& json, Value value) {
  if (!json.take('{')) return false;
  if (json.take('}')) return true;
  std::vector<char> key;
  do {
    key.clear();
    if (!json.string(key) || !json.take(':') || !value(std::string(key.data(), key.size()))) return false;
  } while (json.take(','));
  return json.take('}');
}

}  // namespace aengine
