// A parsed template. Nodes of one kind use the fields that their comment names; the rest stay empty.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/jinja_value.h"

namespace fut::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    constant,     ///< value
    name,         ///< name
    list,         ///< parts; name "tuple" for a tuple
    dict,         ///< parts: key, value, key, value ...
    attribute,    ///< parts[0] . name
    item,         ///< parts[0] [ parts[1] ]
    slice,        ///< parts[0] [ parts[1] : parts[2] : parts[3] ], absent ones null
    call,         ///< parts[0] ( parts[1...], named )
    filter,       ///< parts[0] | name ( parts[1...], named )
    test,         ///< parts[0] is name ( parts[1...], named )
    unary,        ///< name is "not", "-" or "+"; parts[0]
    binary,       ///< name is the operator
    compare,      ///< parts[0] names[0] parts[1] names[1] parts[2] ...
    conditional,  ///< parts[0] if parts[1] else parts[2], which may be null
  };
  Kind kind;
  int line = 0;
  int depth = 1;  ///< of the tree below
  std::string name = {};
  Value value = {};
  std::vector<ExpressionPtr> parts = {};
  std::vector<std::pair<std::string, ExpressionPtr>> named = {};
  std::vector<std::string> names = {};
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  enum class Kind {
    data,         ///< text
    print,        ///< expression
    condition,    ///< branches in order; an "else" has no expression
    loop,         ///< targets in expression, if filter: body, else otherwise
    assign,       ///< targets = expression; name is the namespace of "set name.target = ..."
    assign_body,  ///< targets[0] = what body writes
    macro,        ///< name, targets are the parameters, standards their default values from the right
    scope,        ///< body in a scope of its own: {% generation %}
    leave,        ///< name is "break" or "continue"
  };
  struct Branch {
    ExpressionPtr condition;
    Block body;
  };
  Kind kind;
  int line = 0;
  std::string text = {}, name = {};
  ExpressionPtr expression = {}, filter = {};
  std::vector<std::string> targets = {};
  std::vector<ExpressionPtr> standards = {};
  std::vector<Branch> branches = {};
  Block body = {}, otherwise = {};
};

/// Refuses what the language does not have, or this subset of it, by name and line. `what` begins every message.
Block parse_template(std::string_view source, const std::string& what);

}  // namespace fut::jinja
