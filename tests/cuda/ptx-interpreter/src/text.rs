//! Parsing of PTX text to statements: scopes, labels, variables and instructions. Names are not yet
//! resolved.

/// Operand as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// Register, special register, variable or label.
    Name(String),
    /// `!%p`.
    Not(String),
    /// `%p|%q`.
    Pair(String, String),
    /// Bits of a literal: f32 for `0f`, f64 for `0d`, otherwise two's complement.
    Imm(u64),
    /// `{a, b}`, or `(a, b)` of a call.
    Vector(Vec<Operand>),
    /// `[a, b]`, `[a+8]`: the contents of the brackets, and the offset of the first.
    Address(Vec<Operand>, i64),
    /// `_`, an unused result.
    Sink,
}

/// Variable with its space, alignment, size in bytes and initial bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Variable {
    pub space: String,
    pub name: String,
    pub align: usize,
    pub size: usize,
    pub extern_: bool,
    pub init: Vec<u8>,
}

/// Statement of a body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Statement {
    Open,
    Close,
    Label(String),
    /// `.reg .pred p, q<3>`: whether predicates, and names with the length of a range.
    Registers(bool, Vec<(String, Option<usize>)>),
    Variable(Variable),
    Instruction {
        /// Predicate, and whether it is negated.
        guard: Option<(String, bool)>,
        /// Parts of the opcode between dots.
        opcode: Vec<String>,
        operands: Vec<Operand>,
        text: String,
    },
}

/// Kernel as written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Entry {
    pub name: String,
    pub params: Vec<Variable>,
    pub body: Vec<Statement>,
    /// `.reqnctapercluster`.
    pub cluster: Option<[u32; 3]>,
    /// Product of `.maxntid` or `.reqntid`.
    pub max_threads: Option<u32>,
}

/// Variables of a module and its first kernel.
pub(crate) fn parse(ptx: &str) -> Result<(Vec<Variable>, Entry), String> {
    let text = strip(ptx);
    let mut variables = vec![];
    let mut rest = text.as_str();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Err("no .entry in the PTX".into());
        }
        let head = rest.strip_prefix(".visible").or(rest.strip_prefix(".weak")).unwrap_or(rest).trim_start();
        if head.starts_with(".entry") {
            return Ok((variables, entry(head)?));
        }
        let line = rest.find('\n').unwrap_or(rest.len());
        if [".version", ".target", ".address_size"].iter().any(|directive| rest.starts_with(directive)) {
            rest = &rest[line..];
        } else if head.starts_with(".func") {
            return Err("device functions that were not inlined are not modelled".into());
        } else {
            let end = rest.find(';').ok_or("a module-level statement without an end")?;
            if let Some(variable) = variable(&rest[..end])? {
                variables.push(variable);
            }
            rest = &rest[end + 1..];
        }
    }
}

/// Removes comments, line numbers and debug sections.
fn strip(ptx: &str) -> String {
    let mut text = String::with_capacity(ptx.len());
    for line in ptx.lines() {
        let line = line.split("//").next().unwrap_or("").trim();
        if line.starts_with(".section") {
            break;
        }
        let directive = line.split_whitespace().next().unwrap_or("");
        if !matches!(directive, ".loc" | ".file") {
            text.push_str(line);
            text.push('\n');
        }
    }
    while let Some(start) = text.find("/*") {
        let end = text[start..].find("*/").map_or(text.len(), |end| start + end + 2);
        text.replace_range(start..end, " ");
    }
    text
}

fn entry(text: &str) -> Result<Entry, String> {
    let open = text.find('{').ok_or("an .entry without a body")?;
    let head = &text[..open];
    let mut entry = Entry::default();
    let after_name = match head.find('(') {
        Some(left) => {
            let right = head.rfind(')').ok_or("parameters without an end")?;
            for param in head[left + 1..right].split(',') {
                entry.params.extend(variable(param)?);
            }
            entry.name = head[".entry".len()..left].trim().into();
            &head[right + 1..]
        }
        None => {
            let name = head[".entry".len()..].split_whitespace().next().ok_or("an .entry without a name")?;
            entry.name = name.into();
            &head[head.find(name).unwrap_or(0) + name.len()..]
        }
    };
    for directive in after_name.split('.').map(str::trim).filter(|directive| !directive.is_empty()) {
        let (name, values) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        let values: Vec<u32> = values.split(',').filter_map(|value| value.trim().parse().ok()).collect();
        match name {
            "maxntid" | "reqntid" => entry.max_threads = Some(values.iter().product()),
            "reqnctapercluster" => {
                entry.cluster = Some([0, 1, 2].map(|i| values.get(i).copied().unwrap_or(1)));
            }
            _ => {}
        }
    }
    entry.body = body(&text[open + 1..])?;
    Ok(entry)
}

/// Statements up to the closing brace of the kernel.
fn body(text: &str) -> Result<Vec<Statement>, String> {
    let mut statements = vec![];
    let mut depth = 0;
    let mut rest = text;
    loop {
        rest = rest.trim_start();
        let first = rest.chars().next().ok_or("a body without an end")?;
        match first {
            '{' => {
                depth += 1;
                statements.push(Statement::Open);
                rest = &rest[1..];
            }
            '}' if depth == 0 => return Ok(statements),
            '}' => {
                depth -= 1;
                statements.push(Statement::Close);
                rest = &rest[1..];
            }
            ';' => rest = &rest[1..],
            _ => {
                let end = rest.find(';').ok_or_else(|| format!("no end of {:?}", &rest[..rest.len().min(80)]))?;
                let colon = rest[..end].find(':').filter(|at| is_label(rest, *at));
                if let Some(colon) = colon {
                    statements.push(Statement::Label(rest[..colon].trim().into()));
                    rest = &rest[colon + 1..];
                } else {
                    statements.extend(statement(rest[..end].trim())?);
                    rest = &rest[end + 1..];
                }
            }
        }
    }
}

/// Whether the text before a colon is a label, and the colon not part of `mbarrier::complete_tx`.
fn is_label(text: &str, colon: usize) -> bool {
    let name = text[..colon].trim();
    !text[colon + 1..].starts_with(':') && !name.is_empty() && name.chars().all(is_name_char)
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

fn statement(text: &str) -> Result<Option<Statement>, String> {
    if let Some(registers) = text.strip_prefix(".reg") {
        let (ty, names) = registers
            .trim_start()
            .split_once(char::is_whitespace)
            .ok_or_else(|| format!("registers without names: {text}"))?;
        let mut list = vec![];
        for name in names.split(',').map(str::trim) {
            match name.split_once('<') {
                Some((prefix, count)) => {
                    let count = count.trim_end_matches('>').parse().map_err(|_| format!("no count: {text}"))?;
                    list.push((prefix.to_string(), Some(count)));
                }
                None => list.push((name.to_string(), None)),
            }
        }
        return Ok(Some(Statement::Registers(ty == ".pred", list)));
    }
    if text.starts_with('.') {
        return Ok(variable(text)?.map(Statement::Variable));
    }
    let mut code = text;
    let mut guard = None;
    if let Some(guarded) = code.strip_prefix('@') {
        let (name, after) =
            guarded.split_once(char::is_whitespace).ok_or_else(|| format!("nothing is guarded: {text}"))?;
        guard = Some((name.trim_start_matches('!').to_string(), name.starts_with('!')));
        code = after.trim_start();
    }
    let (opcode, operands) = code.split_once(char::is_whitespace).unwrap_or((code, ""));
    let opcode = opcode.split('.').map(str::to_string).collect();
    let operands = split(operands).into_iter().map(operand).collect::<Result<_, _>>()?;
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Ok(Some(Statement::Instruction { guard, opcode, operands, text }))
}

/// Splits at commas outside of brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (vec![], 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        parts.push(last);
    }
    parts
}

fn operand(text: &str) -> Result<Operand, String> {
    if let Some(inner) = text.strip_prefix(['{', '(']) {
        let inner = inner.trim_end().trim_end_matches(['}', ')']);
        return Ok(Operand::Vector(split(inner).into_iter().map(operand).collect::<Result<_, _>>()?));
    }
    if let Some(inner) = text.strip_prefix('[') {
        let parts = split(inner.trim_end().trim_end_matches(']'));
        let first = *parts.first().ok_or("an empty address")?;
        let sign = first.rfind(['+', '-']).filter(|at| *at > 0);
        let (base, offset) = match sign {
            Some(at) => {
                let offset = first[at + 1..].trim().trim_start_matches('+');
                let negative = first[at..].starts_with('-') != offset.starts_with('-');
                let value = literal(offset.trim_start_matches('-')).ok_or_else(|| format!("no offset: {text}"))? as i64;
                (first[..at].trim().trim_end_matches('+'), if negative { -value } else { value })
            }
            None => (first, 0),
        };
        let mut operands = vec![operand(base)?];
        for part in &parts[1..] {
            operands.push(operand(part)?);
        }
        return Ok(Operand::Address(operands, offset));
    }
    if text == "_" {
        return Ok(Operand::Sink);
    }
    if let Some(name) = text.strip_prefix('!') {
        return Ok(Operand::Not(name.trim().into()));
    }
    if let Some((a, b)) = text.split_once('|') {
        return Ok(Operand::Pair(a.trim().into(), b.trim().into()));
    }
    if let Some(value) = literal(text) {
        return Ok(Operand::Imm(value));
    }
    if !text.is_empty() && text.chars().all(|c| is_name_char(c) || c == '.') {
        return Ok(Operand::Name(text.into()));
    }
    Err(format!("operand {text:?} is not understood"))
}

fn literal(text: &str) -> Option<u64> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let value = if let Some(hex) = digits.strip_prefix("0f").or(digits.strip_prefix("0F")).filter(|h| h.len() == 8) {
        u64::from(u32::from_str_radix(hex, 16).ok()?)
    } else if let Some(hex) = digits.strip_prefix("0d").or(digits.strip_prefix("0D")).filter(|h| h.len() == 16) {
        u64::from_str_radix(hex, 16).ok()?
    } else {
        let digits = digits.trim_end_matches('U');
        if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
            u64::from_str_radix(hex, 16).ok()?
        } else if let Some(bits) = digits.strip_prefix("0b") {
            u64::from_str_radix(bits, 2).ok()?
        } else if digits.contains('.') {
            return Some(u64::from(text.parse::<f32>().ok()?.to_bits()));
        } else {
            digits.parse().ok()?
        }
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// `.extern .shared .align 16 .b8 name[4] = {1, 2}`; None for other directives.
fn variable(text: &str) -> Result<Option<Variable>, String> {
    let (declaration, init) = text.split_once('=').map_or((text, ""), |(declaration, init)| (declaration, init));
    let mut variable =
        Variable { space: String::new(), name: String::new(), align: 0, size: 0, extern_: false, init: vec![] };
    let mut element = 0;
    let mut words = declaration.split_whitespace().peekable();
    while let Some(word) = words.next() {
        match word {
            ".extern" => variable.extern_ = true,
            ".visible" | ".weak" | ".common" | ".ptr" => {}
            ".global" | ".shared" | ".local" | ".const" | ".param" => {
                // `.param .u64 .ptr .global .align 1 name` names the space it points to.
                if variable.space.is_empty() {
                    variable.space = word[1..].into();
                }
            }
            ".align" => {
                let align = words.next().and_then(|align| align.parse().ok());
                variable.align = align.ok_or_else(|| format!("no alignment: {text}"))?;
            }
            _ if word.starts_with('.') && element == 0 && !variable.space.is_empty() => {
                element = match word {
                    ".b8" | ".u8" | ".s8" => 1,
                    ".b16" | ".u16" | ".s16" | ".f16" => 2,
                    ".b32" | ".u32" | ".s32" | ".f32" => 4,
                    ".b64" | ".u64" | ".s64" | ".f64" => 8,
                    _ => return Err(format!("type of {text:?} is not understood")),
                };
            }
            _ if word.starts_with('.') => return Ok(None),
            _ => {
                let (name, dims) = word.split_once('[').map_or((word, ""), |(name, dims)| (name, dims));
                variable.name = name.into();
                let array = word.contains('[');
                let mut count = 1;
                for dim in dims.split('[').map(|dim| dim.trim_end_matches(']')).filter(|_| array) {
                    count *= if dim.is_empty() { 0 } else { dim.parse().map_err(|_| format!("no length: {text}"))? };
                }
                variable.size = element * count;
            }
        }
    }
    if variable.space.is_empty() || variable.name.is_empty() {
        return Ok(None);
    }
    if variable.align == 0 {
        variable.align = element;
    }
    for value in init.trim().trim_start_matches('{').trim_end_matches('}').split(',') {
        match literal(value.trim()) {
            Some(value) => variable.init.extend(&value.to_le_bytes()[..element]),
            None if value.trim().is_empty() => {}
            None => return Ok(None),
        }
    }
    Ok(Some(variable))
}
