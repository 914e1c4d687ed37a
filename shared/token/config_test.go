package token

import (
	"maps"
	"strings"
	"testing"
)

func TestParseConfig(t *testing.T) {
	c, err := ParseConfig([]byte(`{"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"pad_token":null,"unk_token":"<u>",
		"sep_token":"<sep>","cls_token":"<cls>","add_bos_token":true,"add_eos_token":false,"model_max_length":4096,"chat_template":"x"}`))
	if err != nil {
		t.Fatal(err)
	}
	if c.BOSToken != "<s>" || c.EOSToken != "</s>" || c.PadToken != "" || c.UnkToken != "<u>" || c.SepToken != "<sep>" || c.ClsToken != "<cls>" {
		t.Errorf("tokens are %+v", c)
	}
	if c.AddBOSToken == nil || !*c.AddBOSToken || c.AddEOSToken == nil || *c.AddEOSToken || c.ModelMaxLength == nil || *c.ModelMaxLength != 4096 {
		t.Errorf("settings are %+v", c)
	}
	if !maps.Equal(c.ChatTemplates, map[string]string{DefaultTemplate: "x"}) {
		t.Errorf("templates are %v", c.ChatTemplates)
	}
}

func TestWhatAConfigLeavesOutIsAbsent(t *testing.T) {
	for name, in := range map[string]string{"nothing": `{}`, "nulls": `{"bos_token":null,"add_bos_token":null,"model_max_length":null,"chat_template":null}`,
		"the huge length that means none": `{"model_max_length":1000000000000000019884624838656}`} {
		c, err := ParseConfig([]byte(in))
		if err != nil || c.BOSToken != "" || c.AddBOSToken != nil || c.ModelMaxLength != nil || c.ChatTemplates != nil {
			t.Errorf("%s gave %+v, %v", name, c, err)
		}
	}
}

func TestAConfigMayNameItsTemplates(t *testing.T) {
	c, err := ParseConfig([]byte(`{"chat_template":[{"name":"default","template":"a"},{"name":"tool_use","template":"b"}]}`))
	if err != nil || !maps.Equal(c.ChatTemplates, map[string]string{DefaultTemplate: "a", ToolTemplate: "b"}) {
		t.Errorf("gave %v, %v", c, err)
	}
}

func TestABadConfigIsRefused(t *testing.T) {
	for in, want := range map[string]string{
		`{`:                       "tokenizer_config.json",
		`{"bos_token":7}`:         "special token",
		`{"bos_token":{"id":7}}`:  "special token",
		`{"model_max_length":-1}`: "model_max_length",
		`{"chat_template":7}`:     "chat_template",
		`{"chat_template":[{"name":"a","template":"x"},{"name":"a","template":"y"}]}`: "chat_template[1]",
	} {
		if c, err := ParseConfig([]byte(in)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s gave %+v, %v", in, c, err)
		}
	}
}

func TestAMalformedTemplateIsRefused(t *testing.T) {
	_, err := NewTemplate(&Config{ChatTemplates: map[string]string{DefaultTemplate: "a\n{% if %}"}})
	if err == nil || !strings.Contains(err.Error(), `"default"`) {
		t.Fatalf("gave %v", err)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"bos_token":"<s>","chat_template":"{{ messages[0].content }}","model_max_length":1e30}`))
	f.Add([]byte(`{"eos_token":{"content":"x"},"chat_template":[{"name":"default","template":"{% for m in messages %}{% endfor %}"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig(data)
		if err != nil {
			return
		}
		if tpl, err := NewTemplate(c); (tpl == nil) == (err == nil) {
			t.Fatalf("gave %v, %v", tpl, err)
		}
	})
}
